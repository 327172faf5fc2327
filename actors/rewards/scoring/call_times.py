"""How long calls of rewards take, for screens that say what a run waits for."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from bus.codec import Json

RECENT = 100
"""Calls that have ended over which their time is averaged."""


class CallTimes:
    """Knows since when each call that is under way runs, and how long the latest ones took."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: dict[object, float] = {}
        """Start of each call under way; the longest first."""
        self._took: deque[float] = deque(maxlen=RECENT)

    @contextmanager
    def timed(self) -> Iterator[None]:
        call, began = object(), self._clock()
        self._began[call] = began
        try:
            yield
        finally:
            del self._began[call]
            self._took.append(self._clock() - began)

    @property
    def running(self) -> int:
        return len(self._began)

    @property
    def longest_s(self) -> float:
        """Return how long the oldest call under way has been; 0 when there is none."""
        return self._clock() - next(iter(self._began.values())) if self._began else 0.0

    @property
    def took_s(self) -> tuple[float, ...]:
        return tuple(self._took)


def reward_report(times: Iterable[CallTimes]) -> dict[str, Json]:
    """Return what a status tells of an actor's rewards: how many are computed, and how long they take."""
    each = list(times)
    took = [seconds for one in each for seconds in one.took_s]
    return {
        "rewards_running": sum(one.running for one in each),
        "rewards_longest_s": max((one.longest_s for one in each), default=0.0),
        "reward_s": sum(took) / len(took) if took else None,
    }
