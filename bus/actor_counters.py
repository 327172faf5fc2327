"""Counters of actors that others read: how much was sampled, and how episodes ended.

An episode that the surroundings of the policy broke says nothing about the policy."""

from collections.abc import Mapping
from typing import NamedTuple, Self

from bus.codec import Json

RECENT_EPISODES = "rollout/recent_episodes"
RECENT_INFRA_FAILED = "rollout/recent_infra_failed_episodes"
INFRA_FAILED_FRACTION = "rollout/infra_failed_fraction"
"""Names of an actor's counters; over several actors the third is the second by the first, and no sum."""
MEANS = "rollout/means"
"""Name under which an actor lists those of its numbers that are means, of which no sum says anything."""
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
        what: counts only what failed by this, such as `reward`; None counts all."""
    return sum(number for end, number in ends.items() if (found := failed_by(end)) and what in (None, found))


def failed_fraction(ends: Mapping[str, int], what: str | None = None) -> float | None:
    """Return the fraction of episodes that `failed` counts; None without episodes."""
    episodes = sum(ends.values())
    return failed(ends, what) / episodes if episodes else None


class SampledCounts(NamedTuple):
    """Sums over trajectories that could have been trained, whatever became of their groups."""

    trajectories: int = 0
    tokens: int = 0
    """Tokens that the policy sampled."""
    rewarded: int = 0
    """Number of the trajectories whose reward is known and can be trusted."""
    reward_sum: float = 0.0

    @property
    def metrics(self) -> dict[str, Json]:
        """Return the sums as numbers of an actor's record."""
        return {f"sampled/{name}": value for name, value in self._asdict().items()}

    @classmethod
    def of(cls, values: Mapping[str, Json]) -> Self | None:
        """Return what is told in an actor's record; None where one of them is missing or no number."""
        found = [values.get(f"sampled/{name}") for name in cls._fields]
        numbers = [value for value in found if isinstance(value, int | float) and not isinstance(value, bool)]
        if len(numbers) < len(found):
            return None
        trajectories, tokens, rewarded, reward_sum = numbers
        return cls(int(trajectories), int(tokens), int(rewarded), reward_sum)

    def plus(self, other: "SampledCounts") -> "SampledCounts":
        return SampledCounts(
            self.trajectories + other.trajectories,
            self.tokens + other.tokens,
            self.rewarded + other.rewarded,
            self.reward_sum + other.reward_sum,
        )

    def since(self, before: "SampledCounts") -> "SampledCounts":
        """Return what came after `before`; all of it where the counts began anew since."""
        if self.trajectories < before.trajectories:
            return self
        return SampledCounts(
            self.trajectories - before.trajectories,
            self.tokens - before.tokens,
            self.rewarded - before.rewarded,
            self.reward_sum - before.reward_sum,
        )
