"""Says when leases wait and no actor takes any, and ends a learner for which none will come."""

import json
import time
from collections.abc import Callable
from math import nan

import structlog

from bus.errors import in_short
from bus.messages import Status
from storage.ledger.ledger import Ledger
from storage.metrics.records import ENDED, Record, is_counters, number

log = structlog.get_logger()
ABSENT_S = 120.0
"""Time without any actor after which the log says so."""
REMIND_S = 600.0
"""Time between two lines of the log while none comes."""
HEARD_S = 180.0
"""Time for which an actor counts as alive that sent counters: they come every two minutes at least."""
ENDS_AFTER_S = 300.0
"""Time without any actor, since the last one ended by what no restart mends, after which a learner ends."""
LATE_S = 60.0
"""Time for which counters may come late that an actor sent before it ended. Those of an earlier time are of
one that was started again under its name with its clock set back."""
ENDED_ACTORS = "ended_actors"
"""Fact of the ledger: why actors have ended, and when, by their names."""
REMEDY = "start `launch actors`, or see in the logs of those that run what they wait for"


class AbsentActors:
    """Watches the consumer of leases, where an actor waits for leases or holds some, and what actors say. The
    ledger remembers who has ended. `clock` counts seconds."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._clock = clock
        self._since_s: float | None = None
        self._told_s: float | None = None
        self._heard_s = clock()
        """When an actor that has not ended was heard; from then on another one has time to come."""
        self._ended: dict[str, tuple[str, float]] = {
            actor: (reason, ended_s)
            for actor, (reason, ended_s) in json.loads(ledger.facts.get(ENDED_ACTORS, "{}")).items()
        }
        """Reasons of the actors that have ended since another one last sent its counters, and when, in
        seconds since the epoch."""

    def write(self, row: Record) -> None:
        """Take a row of the run's record, which may be the last of an actor."""
        actor, time_s = str(row["source"]), number(row, "time_s")
        if ENDED in row:
            reason = str(row[ENDED])
            self._ended[actor] = reason, time_s
            self._remember()
            log.error("actor_ended", actor=actor, reason=reason)
        elif is_counters(row) and not 0 <= self._ended.get(actor, ("", nan))[1] - time_s <= LATE_S:
            self._heard_s = self._clock()
            if self._ended:
                self._ended.clear()
                self._remember()

    def hear(self, status: Status) -> None:
        """Take the status of an actor: one that starts sends no counters yet."""
        if status.wait in ("engine", "policy"):
            self.give_time()

    def give_time(self) -> None:
        """Let `ENDS_AFTER_S` begin anew: an actor or a learner has just begun."""
        self._heard_s = self._clock()

    def _remember(self) -> None:
        self._ledger.set_fact(ENDED_ACTORS, json.dumps(self._ended))

    @property
    def alarm(self) -> str:
        """Return why actors ended, while no other is there, and what follows; empty for none."""
        if not self._ended:
            return ""
        each = "; ".join(f"{actor} ended: {in_short(reason)}" for actor, (reason, _) in self._ended.items())
        return f"{each}; unless another one comes within {ENDS_AFTER_S:.0f} s, the learner ends too"

    @property
    def failure(self) -> str:
        """Return why a learner is to wait no longer; empty while it is."""
        if not self._ended or self._clock() - self._heard_s < ENDS_AFTER_S:
            return ""
        reasons = "\n".join(f"{actor}: {reason}" for actor, (reason, _) in self._ended.items())
        return (
            f"no actor was heard for {ENDS_AFTER_S:.0f} s, and the last ones ended by what no restart mends. "
            f"Mend it, start `launch actors`, and start the learner again. Why they ended:\n{reasons}"
        )

    def look(self, *, waiting_leases: int, waiting_pulls: int, held_leases: int) -> None:
        """Take the counts of the consumer, which are asked for about once a second. The server counts leases
        as held that a dead actor has had, until another one asks for leases."""
        now_s = self._clock()
        held = held_leases and now_s - self._heard_s < HEARD_S
        if not (waiting_leases or held_leases) or waiting_pulls or held:
            if self._told_s is not None:
                log.info("actors_are_there_again", after_s=round(self.absent_s))
            self._since_s = self._told_s = None
            return
        self._since_s = now_s if self._since_s is None else self._since_s
        if self.absent_s and (self._told_s is None or now_s - self._told_s > REMIND_S):
            log.warning(
                "no_actors",
                waiting_s=round(self.absent_s),
                waiting_leases=waiting_leases + held_leases,
                remedy=REMEDY,
            )
            self._told_s = now_s

    @property
    def absent_s(self) -> float:
        """Return the seconds for which leases have waited without any actor; 0 before `ABSENT_S`."""
        absent_s = 0.0 if self._since_s is None else self._clock() - self._since_s
        return absent_s if absent_s > ABSENT_S else 0.0
