"""Tells failures that the policy caused, by what it wrote, from those of what it was given to use."""

from collections import deque

LATEST = 100
"""Uses among which one must have worked, so that a failure is the policy's."""
REWARD_FAULT = "reward_fault"
"""Field of a trajectory's metadata that says how the policy kept its episode from being scored."""
LONGEST_FAULT = 500
FAULT_FRACTION = "rollout/reward_fault_fraction"
"""Metric of an episode: 1 where it has the lowest reward since it could not be scored, else 0."""


class LatestUses:
    """Notes which of the latest `LATEST` uses of something worked, such as a tool or an agent's program.

    Where one did, the thing is not broken, and a use that fails is the policy's doing. Were such an episode
    left out of training, the policy could learn to make it fail in place of a wrong answer. Where none did,
    a failure says nothing about the policy."""

    def __init__(self) -> None:
        self._worked: deque[bool] = deque(maxlen=LATEST)

    def note(self, *, worked: bool) -> None:
        """Note how a use ended."""
        self._worked.append(worked)

    @property
    def work(self) -> bool:
        """Return whether one of them worked."""
        return any(self._worked)
