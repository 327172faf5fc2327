"""How many requests wait for room in an engine."""

import time
from collections.abc import Callable

from storage.dispatch.absent_actors import HEARD_S
from storage.metrics.records import ENDED, Record, is_counters, number


class EngineQueues:
    """Counts the requests that wait, by what actors say of their engines. `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._queued: dict[str, tuple[float, float]] = {}
        """Requests of each actor's queue, and when that was heard."""

    def write(self, row: Record) -> None:
        """Take a row of the run's record."""
        actor = str(row["source"])
        if ENDED in row:
            self._queued.pop(actor, None)
        elif is_counters(row) and (queued := number(row, "engine/queued")) >= 0:
            self._queued[actor] = queued, self._clock()

    @property
    def requests(self) -> float:
        """Return how many wait, of all actors that are heard of."""
        earliest_s = self._clock() - HEARD_S
        return sum(queued for queued, heard_s in self._queued.values() if heard_s > earliest_s)
