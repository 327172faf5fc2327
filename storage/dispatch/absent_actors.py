"""Says when leases wait and no actor takes any."""

import time
from collections.abc import Callable

import structlog

from bus.errors import in_short
from storage.metrics.records import ENDED, Record, is_counters

log = structlog.get_logger()
ABSENT_S = 120.0
"""Time without any actor after which the log says so."""
REMIND_S = 600.0
"""Time between two lines of the log while none comes."""
REMEDY = "start `launch actors`, or see in the logs of those that run what they wait for"


class AbsentActors:
    """Watches the consumer of leases: an actor waits there for leases, or holds some.

    `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since_s: float | None = None
        self._told_s: float | None = None
        self._ended: dict[str, str] = {}
        """Reasons of the actors that have ended since another one last sent its counters."""

    def write(self, row: Record) -> None:
        """Take a row of the run's record, which may be the last of an actor."""
        if ENDED in row:
            actor, reason = str(row["source"]), str(row[ENDED])
            self._ended[actor] = reason
            log.error("actor_ended", actor=actor, reason=reason)
        elif is_counters(row) and row["source"] not in self._ended:
            self._ended.clear()

    @property
    def alarm(self) -> str:
        """Return why actors ended, while no other is there; empty for none."""
        return "; ".join(f"{actor} ended: {in_short(reason)}" for actor, reason in self._ended.items())

    def look(self, *, waiting_leases: int, waiting_pulls: int, held_leases: int) -> None:
        """Take the counts of the consumer, which are asked for about once a second."""
        now_s = self._clock()
        if not waiting_leases or waiting_pulls or held_leases:
            if self._told_s is not None:
                log.info("actors_are_there_again", after_s=round(self.absent_s))
            self._since_s = self._told_s = None
            return
        self._since_s = now_s if self._since_s is None else self._since_s
        if self.absent_s and (self._told_s is None or now_s - self._told_s > REMIND_S):
            log.warning(
                "no_actors", waiting_s=round(self.absent_s), waiting_leases=waiting_leases, remedy=REMEDY
            )
            self._told_s = now_s

    @property
    def absent_s(self) -> float:
        """Return the seconds for which leases have waited without any actor; 0 before `ABSENT_S`."""
        absent_s = 0.0 if self._since_s is None else self._clock() - self._since_s
        return absent_s if absent_s > ABSENT_S else 0.0
