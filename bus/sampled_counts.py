"""Names of the counters by which actors tell how much they have sampled, and the learner compares."""

from collections.abc import Mapping
from typing import NamedTuple, Self

from bus.codec import Json


class SampledCounts(NamedTuple):
    """Sums over trajectories that could have been trained, whatever became of their groups."""

    trajectories: int = 0
    tokens: int = 0
    """Tokens that the policy sampled."""
    rewarded: int = 0
    """Those of the trajectories whose reward is known and can be trusted."""
    reward_sum: float = 0.0

    @property
    def metrics(self) -> dict[str, Json]:
        """Return them as numbers of an actor's record."""
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
        """Return the sums of both."""
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
