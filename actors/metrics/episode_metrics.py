"""Counts how the episodes of an actor ended, and averages the numbers that environments give with them."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import isfinite
from numbers import Real

import numpy as np
import structlog

from actors.episodes.episode import AgentTrajectory, Episode, FailedEpisode
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

log = structlog.get_logger()
RECENT = 1000
"""Latest episodes, by which screens tell and average: a judge that fails after a day is seen at once."""
MOST_NAMES = 100
"""Names that are kept: an environment that invents one for each episode costs no memory without end."""
TAKEN_NAMES = frozenset({"time_s", "source", "step", "kind", "event"})
"""Names of what every row of the record begins with."""


class EpisodeEnds:
    """Ends of all episodes since the actor's start, and of the last `RECENT` ones."""

    def __init__(self) -> None:
        self._all: Counter[str] = Counter()
        self._recent: deque[str] = deque(maxlen=RECENT)

    def add(self, ends: Iterable[End]) -> None:
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


class EpisodeMetrics:
    """The mean of each of `Episode.metrics` over the latest `RECENT` episodes that have it."""

    def __init__(self) -> None:
        self._recent: dict[str, deque[float]] = {}
        self._refused: set[str] = set()

    def add(self, episodes: Iterable[Episode | FailedEpisode]) -> None:
        """Take the numbers of further episodes; what is no finite number is left out and logged once."""
        for episode in episodes:
            if not isinstance(episode, Episode):
                continue
            if not isinstance(episode.metrics, Mapping):
                self._refuse("", f"{type(episode.metrics).__name__} is no mapping of names to numbers")
                continue
            for name, value in episode.metrics.items():
                self._take(name, value)

    def _take(self, name: object, value: object) -> None:
        number = _finite(value)
        if not isinstance(name, str) or name in TAKEN_NAMES:
            self._refuse(str(name), "a name is a text other than " + ", ".join(sorted(TAKEN_NAMES)))
        elif name not in self._recent and len(self._recent) >= MOST_NAMES:
            self._refuse("", f"there are {MOST_NAMES} names already, and {name!r} would be one more")
        elif number is None:
            self._refuse(name, f"{value!r:.100} is no finite number")
        else:
            self._recent.setdefault(name, deque(maxlen=RECENT)).append(number)

    def _refuse(self, name: str, reason: str) -> None:
        if name not in self._refused and len(self._refused) < MOST_NAMES:
            self._refused.add(name)
            log.warning("episode_metric_left_out", name=name, reason=reason)

    @property
    def metrics(self) -> dict[str, Json]:
        return {name: sum(values) / len(values) for name, values in self._recent.items()}


def _finite(value: object) -> float | None:
    """Return a number of an environment's own making as a float; None for what is no finite number."""
    if not isinstance(value, Real):
        return None
    with suppress(OverflowError):
        number = float(value)
        return number if isfinite(number) else None
    return None
