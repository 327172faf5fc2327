"""Rewards and lengths of the trajectories that a step trains on, as curves show them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import fsum
from statistics import stdev
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bus.trajectory import SOURCE, Trajectory

MOST_NAMES = 100
"""Parts of a reward, and sources, that have figures: a reward that invents a name for each answer makes no
column for each."""


class ImportanceRatios(NamedTuple):
    """What the weights that a trajectory was trained from made of its tokens, over what sampled them."""

    mean: float
    """Mean of the importance ratios of its trained tokens."""
    least: float
    largest: float
    truncated: float
    """Share of the tokens whose ratio was out of the correction's bounds."""


class Outcome(NamedTuple):
    """What one trained trajectory earned, and how long it was."""

    trajectory_id: str
    source: str
    """Name of the source of its prompt; empty where it names none."""
    reward: float
    parts: Mapping[str, float]
    """What each part of the reward was, by its name."""
    tokens: int
    """Number of its trained tokens."""
    is_too_long: bool
    """Says whether the trajectory ended at the limit of its tokens."""
    advantage: float
    """Mean over the trained tokens."""

    @classmethod
    def of(cls, trajectory: Trajectory, advantages: NDArray[np.float64]) -> "Outcome":
        mask = trajectory.loss_mask
        return cls(
            trajectory.trajectory_id,
            str(trajectory.metadata.get(SOURCE, "")),
            trajectory.reward,
            trajectory.reward_components,
            int(mask.sum()),
            trajectory.end == "length",
            float(advantages[mask].mean() if advantages.ndim else advantages),
        )


@dataclass(frozen=True)
class Outcomes:
    """Outcomes of all trained trajectories of a step, in any order."""

    each: Sequence[Outcome] = ()
    spreads: Sequence[float] = ()
    """Standard deviation of the rewards of each group that has several, for each of its agents."""

    @property
    def rewards(self) -> list[float]:
        return [one.reward for one in self.each]

    @property
    def lengths(self) -> list[int]:
        return [one.tokens for one in self.each]

    @property
    def reward_mean(self) -> float:
        """Return the mean over the trajectories; 0 without any."""
        return _mean(self.rewards) if self.each else 0.0

    @property
    def figures(self) -> dict[str, float]:
        """Return the figures of a step, as far as there are trajectories for them. Standard deviations are
        those of samples, with n - 1, as TRL has them."""
        rewards, lengths = self.rewards, self.lengths
        if not rewards:
            return {}
        return {
            "reward/min": min(rewards),
            "reward/max": max(rewards),
            **({"reward/std": stdev(rewards)} if len(rewards) > 1 else {}),
            **({"reward/group_std_mean": _mean(self.spreads)} if self.spreads else {}),
            **{f"reward_part/{name}": mean for name, mean in _parts(self.each)},
            "train/response_tokens_p95": float(np.percentile(lengths, 95)),
            "train/response_tokens_max": max(lengths),
            "rollout/too_long_fraction": _mean([one.is_too_long for one in self.each]),
            **dict(self._by_source()),
        }

    def _by_source(self) -> Iterator[tuple[str, float]]:
        sources: defaultdict[str, list[Outcome]] = defaultdict(list)
        for one in self.each:
            sources[one.source].append(one)
        for name in islice(sorted(filter(None, sources)), MOST_NAMES):
            yield f"source_reward/{name}", _mean([one.reward for one in sources[name]])
            yield f"source_response_tokens/{name}", _mean([one.tokens for one in sources[name]])
            yield from ((f"source_reward_part/{name}/{part}", mean) for part, mean in _parts(sources[name]))


def _parts(trajectories: Iterable[Outcome]) -> Iterator[tuple[str, float]]:
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for one in trajectories:
        for name, value in one.parts.items():
            parts[name].append(value)
    for name in islice(sorted(parts), MOST_NAMES):
        yield name, _mean(parts[name])


def _mean(values: Sequence[float]) -> float:
    return fsum(values) / len(values)


def spreads_of(agents: Iterable[Sequence[float]]) -> list[float]:
    """Return the standard deviations of the rewards of each agent's episodes in a group."""
    return [stdev(rewards) for rewards in agents if len(rewards) > 1]


def joined(all_ranks: Sequence[Outcomes]) -> Outcomes:
    """Return the outcomes of several ranks as those of one."""
    return Outcomes(
        each=[one for rank in all_ranks for one in rank.each],
        spreads=[spread for rank in all_ranks for spread in rank.spreads],
    )
