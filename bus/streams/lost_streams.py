"""Makes again what a bus loses of a run's streams and consumers while the run goes on."""

import asyncio
from collections import Counter

import nats.errors
import structlog
from nats.js.errors import NotFoundError

from bus.connection import Bus
from bus.errors import SluiceError
from bus.topology import ensure
from bus.waiting import set_within

log = structlog.get_logger()
LOOK_S = 3.0
"""Seconds between two looks at the streams."""


async def keep_streams(bus: Bus, shards: int, stop: asyncio.Event) -> None:
    """Make streams and consumers again that are gone, until `stop`.

    What was on them is gone too, and its owner writes it again: the ledger leases, storage held-out
    prompts, the learner weights and model files for who asks. Events, and messages that were set
    aside, do not come back."""
    while not await set_within(stop, LOOK_S):
        try:
            if gone := await _gone(bus, shards):
                log.warning("streams_made_again", gone=gone)
                await ensure(bus.js, bus.topology, shards)
        except (
            SluiceError,
            nats.errors.Error,
        ) as error:  # the bus is away, or has no room: it is tried again
            log.warning("streams_not_kept", reason=str(error) or type(error).__name__)


async def _gone(bus: Bus, shards: int) -> list[str]:
    """Return the streams that are gone, or that lack one of their consumers."""
    consumers = Counter(bus.topology.stream(stream) for stream, _ in bus.topology.consumers(shards))
    gone = []
    for name in (str(config.name) for config in bus.topology.streams()):
        try:
            found = await bus.js.stream_info(name)
        except NotFoundError:
            gone.append(name)
        else:
            if found.state.consumer_count < consumers[name]:
                gone.append(f"consumers of {name}")
    return gone
