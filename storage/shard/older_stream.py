"""Trajectories that an older build left on the one stream that it had for all shards."""

import asyncio
from collections.abc import Awaitable, Callable

import nats.errors
import structlog
from nats.js.errors import NotFoundError

from bus.connection import Bus
from bus.streams.consume import Inbox, consume_batches
from bus.topology import TRAJECTORIES, trajectories_stream
from bus.trajectory import TrajectoryBatch
from bus.waiting import RETRY_S, set_within

log = structlog.get_logger()
LOOK_S = 0.5
"""Seconds between two looks whether all of them were taken."""


async def drain_older_stream(
    bus: Bus, shard: int, inbox: Inbox, append: Callable[[list[TrajectoryBatch]], Awaitable[None]], *,
    stop: asyncio.Event, limit: int,
) -> None:  # fmt: skip
    """Store what TRAJECTORIES holds for a shard that has a stream of its own by now.

    nats-server keeps acked messages whose subject the stream no longer has, so they are purged."""
    stream, subject = bus.topology.stream(TRAJECTORIES), bus.subject("trajectories", shard)
    if trajectories_stream(shard) == TRAJECTORIES or not await _left(bus, stream, subject, stop):
        return
    log.info("older_stream_drained", shard=shard, stream=stream)
    await bus.js.add_consumer(stream, bus.topology.shard_consumer(shard))
    drained = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(consume_batches(inbox, bus, TrajectoryBatch, append, stop=drained, limit=limit))
        while not drained.is_set():
            await set_within(stop, LOOK_S)
            if stop.is_set() or await _all_acked(bus, stream, shard):
                drained.set()
    if not stop.is_set():
        await bus.js.purge_stream(stream, subject=subject)


async def _left(bus: Bus, stream: str, subject: str, stop: asyncio.Event) -> bool:
    """Return whether the stream has messages of the subject, once storage has made it take no more."""
    while not stop.is_set():
        try:
            found = await bus.js.stream_info(stream, subject)
        except NotFoundError:
            return False
        if bus.subject("trajectories", ">") not in (found.config.subjects or ()):
            return bool(found.state.subjects)
        await set_within(stop, RETRY_S)
    return False


async def _all_acked(bus: Bus, stream: str, shard: int) -> bool:
    try:
        found = await bus.js.consumer_info(stream, f"shard-{shard}")
    except nats.errors.Error as error:  # the bus is away: it is asked again
        log.debug("older_stream_not_seen", reason=str(error))
        return False
    return not found.num_pending and not found.num_ack_pending
