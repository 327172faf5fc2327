"""Takes another data set while the run goes on, after the same checks as at its start."""

import asyncio

from bus.codec import Message, decode
from bus.connection import Bus
from bus.errors import ConfigError
from bus.evaluation_messages import PromptSet
from bus.messages import PolicyManifest
from bus.requests import DataAccepted, NewData
from bus.streams.blob_store import get_blob
from storage.ledger.ledger import Ledger
from storage.prompt_files.dataset import refuse_large
from storage.prompts.data_sets import DataSets
from storage.prompts.length_check import check_lengths, lengths_exceeded


class DataUpdates:
    """Answers `launch data`."""

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
        found = await self._bus.get_settled("policy", PolicyManifest)
        if found is None:
            raise ConfigError(
                "the learner has not published its model yet, which prompts are checked against"
            )
        prompts = decode(await get_blob(self._bus, request.prompts), PromptSet).prompts
        if not prompts:
            raise ConfigError(f"{request.source}: holds no prompts")
        largest = self._bus.client.max_payload
        await asyncio.to_thread(refuse_large, prompts, request.source, largest_message=largest)
        async with self._one_at_a_time:
            model, longest = found[0].model, self._max_new_tokens
            long: list[int] = []
            if self._skip_long:
                long = await lengths_exceeded(self._bus, model, prompts, max_new_tokens=longest)
            else:
                await check_lengths(self._bus, model, prompts, max_new_tokens=longest)
            latest = await self._data.add(prompts, keep_old=request.keep_old, source=request.source)
            first = latest.count - len(prompts)
            self._data.skip_long(first + index for index in long)  # at once: before a lease is issued
            await asyncio.to_thread(self._ledger.flush)
        return [DataAccepted(first_lease=latest.first_lease, prompts=latest.count)]
