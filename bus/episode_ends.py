"""How episodes ended, counted: what of them the surroundings of the policy broke."""

from collections.abc import Mapping

from bus.trajectory import TRUSTED_ENDS

RECENT_EPISODES = "rollout/recent_episodes"
RECENT_INFRA_FAILED = "rollout/recent_infra_failed_episodes"
INFRA_FAILED_FRACTION = "rollout/infra_failed_fraction"
"""Names of an actor's counters; over several actors the third is the second by the first, and no sum."""


def infra_failed(ends: Mapping[str, int]) -> int:
    """Return the number of episodes whose end is not to be trusted, so that they are not trained on.

    Args:
        ends: episodes by end.
    """
    return sum(number for end, number in ends.items() if end not in TRUSTED_ENDS)


def infra_failed_fraction(ends: Mapping[str, int]) -> float | None:
    """Return the fraction of episodes that failed for reasons outside the policy; None without episodes."""
    episodes = sum(ends.values())
    return infra_failed(ends) / episodes if episodes else None
