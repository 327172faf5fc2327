"""Names of the policies that a run trains."""

DEFAULT_POLICY = "default"
"""Name of the run's own policy, the only one in most runs."""
SEPARATOR = "__"
"""Stands between the name of a run and that of a policy in the name of the policy's own run."""


def policy_run(run: str, policy: str) -> str:
    """Return the name of the run that trains a further policy of `run`."""
    return f"{run}{SEPARATOR}{policy}"
