"""Makes again what a bus loses while the run goes on: streams and consumers, and the keys of their owner."""

import asyncio
from collections import Counter

import nats.errors
import structlog
from nats.js.errors import NotFoundError

from bus.codec import Message
from bus.connection import Bus
from bus.errors import BusError, SluiceError
from bus.topology import ensure
from bus.waiting import set_within

log = structlog.get_logger()
LOOK_AT_STREAMS_S = 3.0
"""Seconds between two looks at the streams."""
LOOK_AT_KEYS_S = 1.0
"""Seconds between two looks at the keys."""


async def keep_streams(bus: Bus, shards: int, stop: asyncio.Event) -> None:
    """Make streams and consumers again that are gone, until `stop`.

    What was on them is gone too, and its owner writes it again: the ledger leases, storage held-out
    prompts, the learner weights and model files for who asks. Events, and messages that were set
    aside, do not come back."""
    while not await set_within(stop, LOOK_AT_STREAMS_S):
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
    consumers = Counter(bus.topology.stream(stream) for stream, _ in bus.topology.consumers(shards))
    gone = []
    for name in (str(config.name) for config in bus.topology.streams(shards)):
        try:
            found = await bus.js.stream_info(name)
        except NotFoundError:
            gone.append(name)
        else:
            if found.state.consumer_count < consumers[name]:
                gone.append(f"consumers of {name}")
    return gone


class OwnRecords:
    """Writes keys, and writes each again within seconds when the bus loses it or somebody overwrites it."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._records: dict[str, Message] = {}

    async def put(self, key: str, message: Message) -> None:
        """Set `key`, which is this process's own from now on."""
        await self._bus.put(key, message)
        self._records[key] = message

    async def keep(self, stop: asyncio.Event) -> None:
        """Look after the keys until `stop`."""
        while not await set_within(stop, LOOK_AT_KEYS_S):
            for key, message in self._records.items():
                try:
                    await self._restore(key, message)
                except BusError as error:  # the message is looked at again
                    log.warning("own_key_not_kept", key=key, reason=str(error))

    async def _restore(self, key: str, message: Message) -> None:
        if await self._bus.holds(key, message):
            return
        log.warning("own_key_written_again", key=key, reason="the bus lost it, or somebody else wrote it")
        await self._bus.create_keys()  # the whole bucket may be gone
        await self._bus.put(key, message)
