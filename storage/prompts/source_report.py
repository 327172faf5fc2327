"""Publishes, for every step, what of it came from which source of prompts, and how each source fares."""

import asyncio
import time
from collections import Counter

import structlog

from bus.codec import Json, encode
from bus.connection import Bus
from bus.errors import BusError
from bus.messages import Metrics
from bus.streams.publish import Publisher
from bus.waiting import set_within
from storage.ledger.ledger import Ledger
from storage.prompts.curriculum import SourceSuccess
from storage.prompts.data_sets import DataSets

log = structlog.get_logger()
PERIOD_S = 1.0
TOLD = "sources_told"
"""Fact of the ledger: the latest step whose sources were told of."""


def source_values(ledger: Ledger, data: DataSets, success: SourceSuccess, step: int) -> dict[str, Json]:
    """Return the numbers of each source at `step`: its groups in that step's batch, its share, the prompts
    drawn from it, its groups with known rewards, and of these the mean reward and the solved fraction."""
    trained = Counter(data.source(use.lease_id) for use in ledger.uses(step))
    values: dict[str, Json] = {}
    for name, figures in success.figures.items():
        values |= {f"source/{name}/{figure}": value for figure, value in figures.items()}
        values[f"source/{name}/groups_in_step"] = trained[name]
    return values


async def report_sources(
    bus: Bus, ledger: Ledger, data: DataSets, success: SourceSuccess, stop: asyncio.Event
) -> None:
    """Publish the numbers of every step that is given groups, until `stop`, where sources are mixed.

    The ledger knows which steps were told of: a restart leaves none out. It runs on the event loop on which
    the ledger is changed."""
    events, stopping = Publisher(bus), False
    while not stopping:
        stopping = await set_within(stop, PERIOD_S)
        told = int(ledger.facts.get(TOLD, "0"))
        if told > ledger.newest_step:  # a learner resumed before it, and is given those steps again
            told = ledger.newest_step
            ledger.set_fact(TOLD, str(told))
        while ledger.uses(told + 1):
            told += 1
            values = source_values(ledger, data, success, told)
            if values and not await _told(bus, events, ledger, told, values):
                break
            ledger.set_fact(TOLD, str(told))


async def _told(bus: Bus, events: Publisher, ledger: Ledger, step: int, values: dict[str, Json]) -> bool:
    """Publish the numbers of a step; return whether the bus has them."""
    metrics = Metrics(source="storage", step=step, time_s=time.time(), values=values)
    name = f"sources-{ledger.facts.get('incarnation', '')}-{step}"
    try:
        await events.publish(bus.subject("events", "metrics"), encode(metrics), message_id=name)
    except BusError as error:
        log.warning("sources_not_told", step=step, reason=str(error))
        return False
    return True
