"""The start of an actor's engines, which may take minutes and is shown meanwhile."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, TypeAlias

from actors.engines.fleet.engine_nodes import LeadingNode
from actors.engines.fleet.fleet import Fleet
from actors.evaluation.engines import OwnEngine
from actors.metrics.counters import report_actor
from actors.other_policies.further_policy import FurtherPolicy
from actors.other_policies.opponents import Opponents
from bus.connection import Bus
from bus.connection.status import Activity

Startable: TypeAlias = LeadingNode | Fleet | Opponents | OwnEngine | FurtherPolicy


async def started(buses: Sequence[Bus], engines: Sequence[Startable], stop: asyncio.Event) -> bool:
    """Start the engines, which may take minutes; return False when `stop` came first. Each run that they are
    for is told on its bus: its storage takes the actor for one that is gone else."""
    finished = asyncio.Event()

    def show(bus: Bus) -> Awaitable[None]:
        return report_actor(bus, lambda: _doing(engines), finished, waits_for=lambda: "its engine to start")

    showing = asyncio.gather(*map(show, buses))
    starting = asyncio.create_task(_start_each(engines))
    stopping = asyncio.create_task(stop.wait())
    parts: set[asyncio.Future[Any]] = {starting, stopping, showing}
    try:
        await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
    finally:
        finished.set()
        if not starting.done():
            starting.cancel()
        stopping.cancel()
        await asyncio.wait(parts)
    showing.result()
    if starting.cancelled():
        return False
    starting.result()
    return True


def _doing(engines: Sequence[Startable]) -> Activity:
    parts = (one.starting for one in engines if isinstance(one, LeadingNode | Fleet))
    known = ", ".join(filter(None, parts))
    return Activity(f"starting its engine{known and ': '}{known}", wait="engine")


async def _start_each(engines: Sequence[Startable]) -> None:
    for engine in engines:
        await engine.start()
