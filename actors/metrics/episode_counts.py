"""Counts how the episodes of an actor ended, and how much it sampled, also of groups nobody trains on."""

from collections import Counter, deque
from collections.abc import Iterable

import numpy as np

from actors.episodes.episode import AgentTrajectory
from bus.actor_counters import (
    FAILED_EPISODES,
    INFRA_FAILED_FRACTION,
    RECENT_EPISODES,
    RECENT_INFRA_FAILED,
    SampledCounts,
    failed,
    failed_fraction,
)
from bus.codec import Json
from bus.trajectory import End

RECENT = 1000
"""Episodes that screens show: a judge that fails after a day is to be seen at once."""


class EpisodeEnds:
    """Ends of all episodes since the actor's start, and of the last `RECENT` ones."""

    def __init__(self) -> None:
        self._all: Counter[str] = Counter()
        self._recent: deque[str] = deque(maxlen=RECENT)

    def add(self, ends: Iterable[End]) -> None:
        """Count further episodes."""
        for end in ends:
            self._all[end] += 1
            self._recent.append(end)

    @property
    def status(self) -> dict[str, Json]:
        """Return the tables of the actor's status: how many episodes ended how."""
        return {"ends": dict(self._all), "recent_ends": dict(Counter(self._recent))}

    @property
    def metrics(self) -> dict[str, Json]:
        """Return the actor's numbers for the run's record; the fraction is that of recent episodes."""
        recent = Counter(self._recent)
        fraction = failed_fraction(recent, "infrastructure")
        return {
            "rollout/episodes": self._all.total(),
            **{f"rollout/{name}": failed(self._all, what) for what, name in FAILED_EPISODES.items()},
            RECENT_EPISODES: recent.total(),
            RECENT_INFRA_FAILED: failed(recent, "infrastructure"),
            **({} if fraction is None else {INFRA_FAILED_FRACTION: fraction}),
        }


def sampled_counts(trajectories: Iterable[AgentTrajectory]) -> SampledCounts:
    """Return the counts of the trainable ones among these, of whatever end, that have a sampled token."""
    sampled = [part for part in trajectories if part.trainable and part.loss_mask.any()]
    rewarded = [part for part in sampled if part.is_trained and not part.reward_due]
    return SampledCounts(
        trajectories=len(sampled),
        tokens=sum(int(np.count_nonzero(part.loss_mask)) for part in sampled),
        rewarded=len(rewarded),
        reward_sum=float(sum(part.reward for part in rewarded)),
    )
