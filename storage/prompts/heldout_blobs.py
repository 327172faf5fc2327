"""Held-out prompts on the bus: a run's storage puts them there, and again when the bus loses them."""

import asyncio
from collections.abc import Sequence

import structlog

from bus.connection import Bus
from bus.errors import BusError
from bus.messages import BlobRef, Prompt
from bus.streams.blob_store import put_only_blob
from bus.streams.lost_data import OwnRecords
from bus.streams.publish import Publisher
from bus.waiting import set_within
from storage.prompt_files.dataset import encoded_prompts
from storage.weights.blob_stores import on_bus

log = structlog.get_logger()
LOOK_S = 3.0
"""Seconds between two looks at the blobs."""


class HeldoutBlobs:
    """Blobs of held-out prompts, each with a key that leads to it."""

    def __init__(self, bus: Bus, records: OwnRecords) -> None:
        """Set the keys by `records`, which looks after them."""
        self._bus = bus
        self._records = records
        self._publisher = Publisher(bus)
        self._kept: dict[str, tuple[BlobRef, Sequence[Prompt], str]] = {}

    async def put(self, prompts: Sequence[Prompt], what: str, *names: str) -> None:
        """Store prompts, which errors call `what`, and set the key `heldout`, or that of a named set."""
        token = "-".join(("heldout", *names))
        ref = await put_only_blob(self._bus, self._publisher, encoded_prompts(prompts, what), token)
        self._kept[token] = ref, prompts, what
        await self._records.put(".".join(("heldout", *names)), ref)

    async def keep(self, stop: asyncio.Event) -> None:
        """Look after the blobs until `stop`: the same prompts have the same name, so that keys stay valid."""
        while not await set_within(stop, LOOK_S):
            for token, (ref, prompts, what) in self._kept.items():
                try:
                    if not await on_bus(self._bus, [ref]):
                        log.warning("heldout_prompts_stored_again", subject=ref.subject)
                        encoded = encoded_prompts(prompts, what)
                        await put_only_blob(self._bus, self._publisher, encoded, token)
                except BusError as error:  # the stream may not be there yet: it is looked at again
                    log.warning("heldout_prompts_not_kept", subject=ref.subject, reason=str(error))
