"""Rewards and lengths of the trajectories that a step trains on, as curves show them."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from statistics import stdev

import numpy as np

from bus.trajectory import Trajectory

MOST_PARTS = 100
"""Names of parts that are counted: a reward that invents one for each answer makes no column for each."""


@dataclass(frozen=True)
class Outcomes:
    """Of each trained trajectory what it earned and how long it was, in any order."""

    rewards: Sequence[float] = ()
    lengths: Sequence[int] = ()
    """Trained tokens of each."""
    too_long: int = 0
    """Trajectories that ended at the limit of their tokens."""
    spreads: Sequence[float] = ()
    """Standard deviation of the rewards of each group that has several, for each of its agents."""
    parts: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """What each part of the reward was, by its name, in the trajectories that have it."""

    @property
    def reward_mean(self) -> float:
        """Return the mean over the trajectories; 0 without any."""
        return fsum(self.rewards) / max(1, len(self.rewards))

    @property
    def figures(self) -> dict[str, float]:
        """Return the figures of a step, as far as there are trajectories for them.

        Standard deviations are those of samples, with n - 1, as TRL has them."""
        rewards, lengths = self.rewards, self.lengths
        if not rewards:
            return {}
        return {
            "reward/min": min(rewards),
            "reward/max": max(rewards),
            **({"reward/std": stdev(rewards)} if len(rewards) > 1 else {}),
            **({"reward/group_std_mean": fsum(self.spreads) / len(self.spreads)} if self.spreads else {}),
            **{f"reward_part/{name}": fsum(found) / len(found) for name, found in sorted(self.parts.items())},
            "train/response_tokens_p95": float(np.percentile(lengths, 95)),
            "train/response_tokens_max": max(lengths),
            "rollout/too_long_fraction": self.too_long / len(rewards),
        }


def outcomes(trained: Sequence[Trajectory], agents: Iterable[Sequence[float]]) -> Outcomes:
    """Return those of trained trajectories, and of the rewards of each agent's episodes in a group."""
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in trained:
        for name, value in trajectory.reward_components.items():
            if name in parts or len(parts) < MOST_PARTS:
                parts[name].append(value)
    return Outcomes(
        rewards=[trajectory.reward for trajectory in trained],
        lengths=[int(trajectory.loss_mask.sum()) for trajectory in trained],
        too_long=sum(trajectory.end == "length" for trajectory in trained),
        spreads=[stdev(rewards) for rewards in agents if len(rewards) > 1],
        parts=dict(parts),
    )


def joined(all_ranks: Sequence[Outcomes]) -> Outcomes:
    """Return the outcomes of several ranks as those of one."""
    names = sorted({name for one in all_ranks for name in one.parts})[:MOST_PARTS]
    return Outcomes(
        rewards=[reward for one in all_ranks for reward in one.rewards],
        lengths=[length for one in all_ranks for length in one.lengths],
        too_long=sum(one.too_long for one in all_ranks),
        spreads=[spread for one in all_ranks for spread in one.spreads],
        parts={name: [value for one in all_ranks for value in one.parts.get(name, ())] for name in names},
    )
