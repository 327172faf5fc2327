"""The pace of a run: the more actors there are, the less often each of them speaks without need.

Storage hears how many actors there are and tells them `Bus.slower`, the factor by which status, counters,
pulls and polls are rarer than in a small run. All actors together then send about as much as `ACTORS` do."""

import asyncio
import time

from bus.connection.bus import Bus
from bus.messages import Pace, Status
from bus.waiting import set_within

ACTORS = 400
"""Actors up to which each speaks as often as a single one."""
COUNT_S = 5.0
REPEAT_S = 30.0
"""Seconds until those that came since, or did not hear it, are told again."""
FORGET_S = 60.0
KEY = "pace"
CHANGE = 1.2
"""Ratio of two factors from which the change is told at once."""


async def follow_pace(bus: Bus) -> None:
    """Keep to the pace that storage tells, from now on. An actor that joins a large run reads it first."""

    def hear(pace: Pace) -> None:
        bus.slower = pace.slower

    await bus.listen(bus.subject("notice", "pace"), Pace, hear)
    found = await bus.get(KEY, Pace)
    if found is not None and bus.slower == 1:
        hear(found[0])


class ActorCount:
    """Counts the actors that speak."""

    def __init__(self) -> None:
        self._heard_s: dict[str, float] = {}

    def on_status(self, status: Status) -> None:
        """Note that an actor is there."""
        self._heard_s[status.source] = time.monotonic()

    def actors(self) -> int:
        """Return how many spoke within the last minute."""
        oldest = time.monotonic() - FORGET_S
        self._heard_s = {source: at for source, at in self._heard_s.items() if at > oldest}
        return len(self._heard_s)


async def tell_pace(
    bus: Bus, stop: asyncio.Event, *, count_s: float = COUNT_S, lower_after_s: float = REPEAT_S
) -> None:
    """Count the actors, and tell them how often to speak, until `stop`. A small run is told nothing. What an
    earlier storage told stays for `lower_after_s`, until all actors have been heard again."""
    found = await bus.get(KEY, Pace)
    told, told_s, began = (found[0].slower if found else 1.0), 0.0, time.monotonic()
    count = ActorCount()
    listening = await bus.listen(bus.subject("status", "actor"), Status, count.on_status)
    while not await set_within(stop, count_s):
        slower = max(1.0, count.actors() / ACTORS)
        if slower < told and time.monotonic() - began < lower_after_s:
            slower = told
        changed = not 1 / CHANGE < slower / told < CHANGE
        if changed or (slower > 1 and time.monotonic() - told_s > REPEAT_S):
            await bus.put(KEY, Pace(slower=slower))  # each time: somebody may have removed it
            await bus.notify(bus.subject("notice", "pace"), Pace(slower=slower))
            told, told_s = slower, time.monotonic()
    await listening.unsubscribe()
