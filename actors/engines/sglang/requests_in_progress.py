"""Requests on their way to one SGLang server and back."""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from actors.engines.base import NOTHING, Generation, GenerationRequest
from actors.engines.sglang.client.answers import Streamed
from actors.engines.sglang.client.client import SglangClient
from actors.engines.sglang.loaded_adapter import LoadedAdapter
from bus.errors import EngineError, RequestRefusedError
from bus.waiting import unless

if TYPE_CHECKING:
    from actors.engines.sglang.served_policy import ServedPolicy

ABORT_AGAIN_S = 0.5
"""An abort that comes before its request is not heard: it is said until the request ends."""
INTERRUPT_AGAIN_S = 0.05
"""The same, while the whole server waits for it."""
ABORT_ALL_AFTER_S = 3.0
"""SGLang 0.5.23 passes the abort of one request on to its scheduler once only: where that was too early, all
requests are ended."""


@dataclass(eq=False)
class RequestInProgress:
    """A request that has not been answered."""

    request: GenerationRequest
    policy: "ServedPolicy"
    rid: str
    sent: asyncio.Task[Generation] | None = None
    streamed: Streamed | None = None
    """The tokens so far, of a server that hands them out."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    adapter: LoadedAdapter | None = None
    """What draws the tokens, at a server that adds adapters itself."""
    interrupted: bool = False
    """Whether the request was ended, with all others, for the sake of new weights."""
    kv_version: int | None = None
    """Version that the server had when the request was sent, where it keeps keys and values over updates."""
    failure: str = ""

    async def admitted(self, serving: asyncio.Event) -> None:
        while not serving.is_set() and not self.aborted.is_set():
            await unless(self.aborted, serving.wait())

    def begins_again(self, generation: Generation) -> bool:
        """Return whether the request was interrupted before its first token, and nobody wants it ended."""
        none = generation.finish_reason == "abort" and not len(generation.token_ids)
        return none and self.interrupted and not self.aborted.is_set()

    @property
    def adapter_name(self) -> str:
        """Return what the server calls its adapter; empty for none."""
        return self.adapter.name if self.adapter else ""

    def answer(self, generation: Generation) -> Generation:
        """Return what the server drew, with its policy versions and those of its keys and values. Raises
        `OtherWeightsError`."""
        if self.adapter:
            return self.adapter.drew(generation)
        return generation if self.kv_version is None else generation.over_kv_of(self.kv_version)

    @property
    def may_wait(self) -> bool:
        """Return whether the server may not have begun with it, as far as it says anything of that."""
        return self.streamed is not None and not self.streamed.begun

    def left(self) -> Generation:
        """Return the tokens that are left of it when it ends before its time."""
        return self.streamed.kept() if self.streamed else NOTHING


class RequestsInProgress:
    """Requests of one server, each from its start until its caller knows of its end."""

    def __init__(self, connected: Callable[[], SglangClient]) -> None:
        self._connected = connected
        self._in_progress: dict[str, RequestInProgress] = {}
        own = uuid.uuid4().hex
        self._rids = (f"{own}-{number:012d}" for number in count())  # none is another's prefix
        self._aborts: set[asyncio.Task[None]] = set()
        self._failed_under: Counter[ServedPolicy] = Counter()

    def __iter__(self) -> Iterator[RequestInProgress]:
        return iter(self._in_progress.values())

    def running(self, policy: "ServedPolicy") -> int:
        return self._by_policy()[policy]

    def _by_policy(self) -> "Counter[ServedPolicy]":
        return Counter(flight.policy for flight in self if flight.sent is not None)

    def waiting(self, policy: "ServedPolicy") -> int:
        return sum(flight.sent is None for flight in self if flight.policy is policy)

    def of_others(self, policy: "ServedPolicy") -> int:
        """Return the number of requests for other policies at the server, or when that failed."""
        counts = self._failed_under or self._by_policy()
        return counts.total() - counts[policy]

    @contextmanager
    def new(self, request: GenerationRequest, policy: "ServedPolicy") -> Iterator[RequestInProgress]:
        """Count a request while inside. Raises `RequestRefusedError` for an id that is in flight."""
        if request.request_id in self._in_progress:
            raise RequestRefusedError(
                f"request {request.request_id} is already in flight: ids must be unique"
            )
        flight = RequestInProgress(request, policy, self._rid(request))
        self._in_progress[request.request_id] = flight
        try:
            yield flight
        finally:
            del self._in_progress[request.request_id]

    def renew(self, flight: RequestInProgress) -> None:
        """Make the request one that was not sent yet."""
        flight.rid, flight.sent, flight.interrupted = self._rid(flight.request), None, False

    async def abort(self, request_id: str) -> None:
        """End a request, and return when it has ended. Unknown ids are ignored."""
        flight = self._in_progress.get(request_id)
        if flight is None:
            return
        flight.aborted.set()
        while flight.sent is not None and not flight.sent.done():
            with suppress(EngineError):  # the request hears of it too
                await self._connected().abort(flight.rid)
            await asyncio.wait({flight.sent}, timeout=ABORT_AGAIN_S)

    def abandon(self, flight: RequestInProgress) -> None:
        """End at the worker what nobody waits for any more."""
        if flight.sent is not None:
            flight.sent.cancel()

        async def abort() -> None:
            with suppress(EngineError):  # a server that is gone runs nothing
                await self._connected().abort(flight.rid)

        task = asyncio.create_task(abort())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def aborted(self) -> None:
        """Wait a short time until the server has answered the aborts of all requests that were abandoned."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=ABORT_AGAIN_S * 4)

    def fail(self, reason: str, *, policy: "ServedPolicy | None" = None) -> None:
        """End all that are at the server, which has failed; or all for a policy, those that wait too."""
        if policy is None and not self._failed_under:
            self._failed_under = self._by_policy()
        for flight in self:
            if policy is not None and flight.policy is not policy:
                continue
            if flight.sent is not None:
                flight.failure = flight.failure or reason
                flight.sent.cancel()
            elif policy is not None:
                flight.failure = reason
                flight.aborted.set()

    def disown(self) -> None:
        """Leave no tokens of any: the server had other weights, and nobody knows since when."""
        for flight in self:
            flight.streamed = None

    def weights_change(self) -> None:
        """Note that the server may draw from other weights now, and a pair may end what has no token yet."""
        for flight in self:
            flight.interrupted = flight.sent is not None
            if flight.streamed is not None:
                flight.streamed.weights_change()

    async def interrupt(
        self, timeout_s: float, *, only: Callable[[RequestInProgress], bool] | None = None
    ) -> None:
        """Have the server end all, or `only` some, and hand out what it has drawn. Raises `EngineError` as
        `drained` does."""
        begun = time.monotonic()
        while under_way := {
            flight: flight.sent
            for flight in self
            if flight.sent is not None and not flight.sent.done() and (only is None or only(flight))
        }:
            waited_s = time.monotonic() - begun
            if waited_s > timeout_s:
                raise EngineError(f"{len(under_way)} requests did not end within {timeout_s:g} s of an abort")
            if only is None or waited_s > ABORT_ALL_AFTER_S:
                await self.abort_all()
            else:
                for flight in under_way:
                    flight.interrupted = True
                with suppress(EngineError):  # the requests hear of it too
                    await asyncio.gather(*(self._connected().abort(flight.rid) for flight in under_way))
            await asyncio.wait(under_way.values(), timeout=INTERRUPT_AGAIN_S)

    async def abort_all(self) -> None:
        """Have the server end all requests, also what was abandoned and what others asked."""
        for flight in self:
            flight.interrupted = flight.interrupted or flight.sent is not None
        with suppress(EngineError):  # the requests hear of it too
            await self._connected().abort_all()

    def _rid(self, request: GenerationRequest) -> str:
        return f"{next(self._rids)}-{request.request_id}"

    async def drained(self, timeout_s: float) -> None:
        """Wait for the end of all that are at the server. Raises `EngineError` when that takes too long."""
        sent = {flight.sent for flight in self if flight.sent is not None}
        if sent:
            _, unfinished = await asyncio.wait(sent, timeout=timeout_s)
            if unfinished:
                raise EngineError(
                    f"{len(unfinished)} requests did not end within "
                    f"actors.engine.update_timeout_s={timeout_s:g}"
                )
