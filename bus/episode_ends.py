"""How episodes ended, counted: what of them the surroundings of the policy broke, and which."""

from collections.abc import Mapping

RECENT_EPISODES = "rollout/recent_episodes"
RECENT_INFRA_FAILED = "rollout/recent_infra_failed_episodes"
INFRA_FAILED_FRACTION = "rollout/infra_failed_fraction"
"""Names of an actor's counters; over several actors the third is the second by the first, and no sum."""
FAILED_BY: Mapping[str, str] = {
    "reward_error": "reward",
    "environment_error": "environment",
    "tool_error": "environment",
    "engine_error": "infrastructure",
    "timeout": "infrastructure",
    "cancelled": "infrastructure",
}
"""What fails an episode whose end says nothing about the policy: the run's reward, its environment with its
tools, or the infrastructure."""
FAILED_EPISODES: Mapping[str, str] = {
    "reward": "reward_failed_episodes",
    "environment": "environment_failed_episodes",
    "infrastructure": "infra_failed_episodes",
}
"""Last word of the names of the counters of episodes that each of these failed."""


def failed_by(end: str) -> str:
    """Return what fails an episode that ends so; an empty text where nothing did."""
    return FAILED_BY.get(end, "")


def failed(ends: Mapping[str, int], what: str | None = None) -> int:
    """Return the number of episodes that failed, so that they are not trained on.

    Args:
        ends: episodes by end.
        what: counts only what failed by this, such as `reward`; None counts all.
    """
    return sum(number for end, number in ends.items() if (found := failed_by(end)) and what in (None, found))


def failed_fraction(ends: Mapping[str, int], what: str | None = None) -> float | None:
    """Return the fraction of episodes that `failed` counts; None without episodes."""
    episodes = sum(ends.values())
    return failed(ends, what) / episodes if episodes else None
