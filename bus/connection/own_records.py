"""Keys of which this process is the owner: what it wrote is written again when it is no longer there."""

import asyncio

import structlog

from bus.codec import Message
from bus.connection.bus import Bus
from bus.errors import BusError
from bus.waiting import set_within

log = structlog.get_logger()
LOOK_S = 1.0
"""Seconds between two looks at the keys."""


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
        while not await set_within(stop, LOOK_S):
            for key, message in self._records.items():
                try:
                    await self._restore(key, message)
                except BusError as error:  # it is looked at again
                    log.warning("own_key_not_kept", key=key, reason=str(error))

    async def _restore(self, key: str, message: Message) -> None:
        if await self._bus.holds(key, message):
            return
        log.warning("own_key_written_again", key=key, reason="the bus lost it, or somebody else wrote it")
        await self._bus.create_keys()  # the whole bucket may be gone
        await self._bus.put(key, message)
