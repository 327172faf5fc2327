"""Takes another data set while the run goes on, after the same checks as at its start."""

import asyncio
from collections.abc import Sequence

import structlog

from bus.codec import Message, decode
from bus.connection import Bus
from bus.errors import BusError, ConfigError
from bus.evaluation_messages import PromptSet
from bus.messages import BlobRef, PolicyManifest, Prompt
from bus.requests import DataAccepted, NewData
from bus.streams.blob_store import get_blob, put_only_blob
from bus.streams.lost_data import OwnRecords
from bus.streams.publish import Publisher
from bus.waiting import set_within
from storage.ledger.ledger import Ledger
from storage.prompt_files.dataset import encoded_prompts, refuse_large
from storage.prompts.data_sets import DataSets
from storage.prompts.length_check import check_lengths, lengths_exceeded
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


class DataUpdates:
    """Answers `launch data`, and checks prompts that come while the run goes on."""

    def __init__(
        self, bus: Bus, ledger: Ledger, data: DataSets, *, max_new_tokens: int, skip_long: bool = False
    ) -> None:
        self._bus = bus
        self._ledger = ledger
        self._data = data
        self._max_new_tokens = max_new_tokens
        self._skip_long = skip_long
        self._one_at_a_time = asyncio.Lock()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`."""
        serving = await self._bus.serve(self._bus.subject("rpc", "data"), NewData, self._answer)
        await stop.wait()
        await serving.unsubscribe()

    async def _answer(self, request: NewData) -> list[Message]:
        """The data set has taken over, durably, or the reason why it cannot is the answer."""
        if self._data.latest.next_row is not None:
            raise ConfigError(
                f"the function {self._data.latest.source} yields the run's prompts: have it yield these, or "
                "start the run again with other data.prompts"
            )
        prompts = decode(await get_blob(self._bus, request.prompts), PromptSet).prompts
        if not prompts:
            raise ConfigError(f"{request.source}: holds no prompts")
        async with self._one_at_a_time:
            long = await self.check(prompts, request.source)
            latest = await self._data.add(prompts, keep_old=request.keep_old, source=request.source)
            first = latest.count - len(prompts)
            self._data.skip_long(first + index for index in long)  # at once: before a lease is issued
            await asyncio.to_thread(self._ledger.flush)
        return [DataAccepted(first_lease=latest.first_lease, prompts=latest.count)]

    async def check(self, prompts: Sequence[Prompt], source: str) -> list[int]:
        """Return the numbers of the prompts that are too long, where such are skipped. Raises `ConfigError`
        for prompts that no lease can carry or that do not fit the learner's model."""
        found = await self._bus.get_settled("policy", PolicyManifest)
        if found is None:
            raise ConfigError(
                "the learner has not published its model yet, which prompts are checked against"
            )
        largest, model = self._bus.client.max_payload, found[0].model
        await asyncio.to_thread(refuse_large, prompts, source, largest_message=largest)
        if self._skip_long:
            return await lengths_exceeded(
                self._bus, model, prompts, max_new_tokens=self._max_new_tokens, called=asyncio.to_thread
            )
        await check_lengths(
            self._bus, model, prompts, max_new_tokens=self._max_new_tokens, called=asyncio.to_thread
        )
        return []
