"""SGLang behind the Engine protocol: a server that is started and watched, or attached to."""

import asyncio
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np
import structlog
import torch

from actors.config import SglangEngineConfig
from actors.engines.base import Generation, GenerationRequest
from actors.engines.published import Published
from actors.engines.sglang_client import ServerFacts, SglangClient, UnreachableError
from actors.engines.sglang_loading import Load, Loading
from actors.engines.sglang_server import AttachedServer, OwnServer, Server
from actors.engines.sglang_weights import HeldWeights
from bus.errors import EngineError, RequestRefusedError

log = structlog.get_logger()
ABORT_AGAIN_S = 0.5
"""An abort that overtakes its request is not heard: it is said until the request ends."""
DYING_S = 1.0
"""Between a broken connection and the end of the process it led to."""
FAILED_LOOKS = 2
"""So many health checks in a row take a server for dead."""


@dataclass(eq=False)
class _Flight:
    """A request that has not been answered."""

    request: GenerationRequest
    rid: str
    """Its name at the server."""
    sent: asyncio.Task[Generation] | None = None
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    failure: str = ""


class SglangEngine:
    """Serves one model through one SGLang server, for as long as that lives.

    Requests wait for the first weights. When the server ends, hangs or does not take weights, all of its
    processes are killed, the requests in flight raise EngineError and so does every call after it: the fleet
    builds another engine."""

    def __init__(
        self, model_dir: Path, config: SglangEngineConfig, log_file: Path, *, number: int = 0
    ) -> None:
        self.failure = ""
        """Why it has stopped for good; empty as long as it has not."""
        self.tokens_generated = 0
        self._config = config
        self._held = HeldWeights(model_dir, config.weights_directory)
        self._server: Server = (
            AttachedServer(config)
            if config.url is not None
            else OwnServer(config, self._held.directory, log_file, number)
        )
        self._client: SglangClient | None = None
        self._facts: ServerFacts | None = None
        self._loading: Loading | None = None
        self._version = -1
        self._loads = 0
        self._serving = asyncio.Event()
        self._doubted = asyncio.Event()
        """Set when a request found the server unreachable: it is looked at now, and new requests wait."""
        self._changing = asyncio.Lock()
        """Held while weights are loaded."""
        self._flights: dict[str, _Flight] = {}
        self._rids = (f"{uuid.uuid4().hex}-{number:012d}" for number in count())  # none is another's prefix
        self._background: set[asyncio.Task[None]] = set()
        self._watcher: asyncio.Task[None] | None = None

    @property
    def policy_version(self) -> int:
        """Version of the weights in use, -1 before the first."""
        return self._version

    @property
    def running(self) -> int:
        """Requests at the server."""
        return sum(flight.sent is not None for flight in self._flights.values())

    @property
    def waiting(self) -> int:
        """Requests that wait for weights, or for a look at a server that did not answer."""
        return len(self._flights) - self.running

    @property
    def url(self) -> str:
        """Where the server listens now."""
        return self._connected().url

    async def start(self) -> None:
        """Start the server, or attach; it generates when weights are loaded.

        Raises ConfigError for settings that this SGLang does not have, EngineError with the server's last
        lines when it does not come up."""
        url = await self._server.start()
        self._client = SglangClient.connect(url)
        await self._server.until_ready(self._client)
        self._facts = await self._client.facts()
        self._loading = Loading(self._held, self._client, self._facts)
        self._loading.check(self._config)
        log.info("sglang_ready", url=url, version=self._facts.version)
        if not self._facts.reports_spans and self._config.pause != "drain":
            log.warning("sglang_reports_no_versions_per_token", version=self._facts.version, pause="drain")
        self._watcher = asyncio.create_task(self._watch())
        self._watcher.add_done_callback(self._watching_ended)

    async def generate(self, request: GenerationRequest) -> Generation:
        """Continue `request`; waits for the first weights. Cancelling the caller aborts the request."""
        if request.request_id in self._flights:
            raise RequestRefusedError(
                f"request {request.request_id} is already in flight: ids must be unique"
            )
        flight = _Flight(request, f"{next(self._rids)}-{request.request_id}")
        self._flights[request.request_id] = flight
        try:
            return await self._fly(flight)
        finally:
            del self._flights[request.request_id]

    async def load_weights(self, state: Mapping[str, torch.Tensor], policy_version: int) -> float:
        """Take the tensors (HF names; the first time all of them); return the seconds generation stood still.

        Without any the smallest is sent again: the server learns of a version with tensors only.
        Raises EngineError for another model's tensors, and when the server fails at it: then it is killed."""
        async with self._changing:
            self._check()
            load = await self._ready().tensors(self._config, state, policy_version)
            return await self._swap(load, policy_version)

    async def load_published(self, published: Published) -> float:
        """Have the learner send the weights to the server; where that fails, fetch and load them.

        Returns and raises as `load_weights`, and WeightsKeptError when they could not be had at all."""
        async with self._changing:
            self._check()
            if self._ready().has(published, self._version):
                return 0.0
            load = await self._ready().published(self._config, published)
            return await self._swap(load, published.policy_version)

    async def abort(self, request_id: str) -> None:
        """End one request now: its `generate` returns the tokens so far. Unknown ids are ignored."""
        flight = self._flights.get(request_id)
        if flight is None:
            return
        flight.aborted.set()
        if flight.sent is not None:
            await self._abort_until_it_ends(flight)

    async def check_health(self) -> None:
        """Raise EngineError when the server has failed; it is looked at all the time."""
        self._check()

    async def close(self) -> None:
        """End the server if it is ours; requests in flight raise EngineError."""
        self._stop_for_good("it was closed")
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait({self._watcher})
        if self._background:
            await asyncio.wait(self._background, timeout=ABORT_AGAIN_S * 4)
        await self._server.kill()
        if self._loading is not None:
            await self._loading.close()
        if self._client is not None:
            await self._client.close()
        self._held.close()

    async def checksums(self) -> dict[str, str]:
        """The server's checksum of each of its parameters: proof of what it computes with."""
        return await self._connected().checksums()

    # A request's way.

    async def _fly(self, flight: _Flight) -> Generation:
        if not await self._admitted(flight):
            return Generation(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32), "abort")
        request, timeout_s = flight.request, self._config.request_timeout_s
        salt = f"{self._version}.{self._loads}"
        flight.sent = asyncio.create_task(
            self._connected().generate(request, rid=flight.rid, salt=salt, timeout_s=timeout_s)
        )
        try:
            await asyncio.wait({flight.sent})
        except asyncio.CancelledError:
            self._abandon(flight)
            raise
        if flight.failure:
            raise EngineError(f"request {request.request_id}: the SGLang server failed: {flight.failure}")
        try:
            generation = flight.sent.result()
        except EngineError as error:
            self._abandon(flight)  # it may have been too slow only, or the connection broke
            if isinstance(error, UnreachableError):
                self._serving.clear()
                self._doubted.set()
            raise
        self.tokens_generated += len(generation.token_ids)
        return generation

    async def _admitted(self, flight: _Flight) -> bool:
        """Wait until the server serves; False when the request was aborted before."""
        while not self._serving.is_set() and not flight.aborted.is_set():
            waits = {
                asyncio.create_task(self._serving.wait()),
                asyncio.create_task(flight.aborted.wait()),
            }
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        self._check()
        return not flight.aborted.is_set()

    def _abandon(self, flight: _Flight) -> None:
        """End at the worker what nobody waits for any more."""
        if flight.sent is not None:
            flight.sent.cancel()

        async def abort() -> None:
            with suppress(EngineError):  # a server that is gone runs nothing
                await self._connected().abort(flight.rid)

        task = asyncio.create_task(abort())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _abort_until_it_ends(self, flight: _Flight) -> None:
        while flight.sent is not None and not flight.sent.done():
            with suppress(EngineError):  # the request hears of it too
                await self._connected().abort(flight.rid)
            await asyncio.wait({flight.sent}, timeout=ABORT_AGAIN_S)

    def _fail_flights(self, reason: str) -> None:
        for flight in self._flights.values():
            if flight.sent is not None:
                flight.failure = flight.failure or reason
                flight.sent.cancel()

    # Weights.

    async def _swap(self, load: Load, wanted: int) -> float:
        """Make the server compute with what `load` has it take; return the seconds it stood still."""
        try:
            version, pause_s = await self._paused(load)
        except EngineError as error:
            await self._fail(f"it did not take policy version {wanted}: {error}")
            raise EngineError(self._stopped()) from error
        self._check()  # it may have died, or been closed, meanwhile
        self._version = version
        self._loads += 1
        self._serving.set()
        return pause_s

    async def _paused(self, load: Load) -> tuple[int, float]:
        """Run `load` while nothing is generated; return what it does, and how many seconds that took."""
        client, facts, config = self._connected(), self._facts, self._config
        assert facts is not None, "set together with the client"
        self._serving.clear()
        mode = config.pause if facts.reports_spans else "drain"
        if mode == "drain":
            await self._drained()
        begun = time.perf_counter()
        if mode != "drain":
            await client.pause(mode)
        try:
            version = await load(mode == "retract")
        finally:
            if mode != "drain":
                await client.resume()
        return version, time.perf_counter() - begun

    async def _drained(self) -> None:
        sent = {flight.sent for flight in self._flights.values() if flight.sent is not None}
        if sent:
            _, late = await asyncio.wait(sent, timeout=self._config.update_timeout_s)
            if late:
                raise EngineError(
                    f"{len(late)} requests did not end within actors.engine.update_timeout_s="
                    f"{self._config.update_timeout_s:g}"
                )

    # The server's life.

    async def _watch(self) -> None:
        await self._fail(await self._until_it_fails())

    def _watching_ended(self, watcher: asyncio.Task[None]) -> None:
        if not watcher.cancelled() and (error := watcher.exception()):
            self._stop_for_good(f"its server is watched no more: {error!r}")

    async def _fail(self, reason: str) -> None:
        """End the server, and all that waits for it, for good."""
        if not self.failure:
            log.warning("sglang_failed", reason=reason)
        self._stop_for_good(reason)
        await self._server.kill()

    async def _until_it_fails(self) -> str:
        failed = 0
        while failed < FAILED_LOOKS:
            if reason := await self._ended_or_doubted():
                return reason
            if self._changing.locked():
                continue
            if await self._connected().healthy(self._config.health_timeout_s):
                failed = 0
                self._open()
            elif not self._changing.locked():
                failed += 1
        return f"it did not generate within {self._config.health_timeout_s:g} s, {FAILED_LOOKS} times"

    async def _ended_or_doubted(self) -> str:
        """Wait for the next look at the server: why it ended, or an empty string."""
        ended = asyncio.create_task(self._server.ended(within_s=self._config.health_every_s))
        doubted = asyncio.create_task(self._doubted.wait())
        try:
            await asyncio.wait({ended, doubted}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (ended, doubted):
                task.cancel()
        if ended.done():
            return ended.result()
        self._doubted.clear()
        return await self._server.ended(within_s=DYING_S)

    def _open(self) -> None:
        """Let requests through, if there are weights to serve them with."""
        if self._version >= 0 and not self._changing.locked():
            self._serving.set()

    def _stop_for_good(self, reason: str) -> None:
        self.failure = self.failure or reason
        self._fail_flights(self.failure)
        self._serving.set()  # who waits is to hear of it

    def _check(self) -> None:
        if self.failure:
            raise EngineError(self._stopped())

    def _stopped(self) -> str:
        return f"the SGLang engine has stopped: {self.failure}"

    def _ready(self) -> Loading:
        if self._loading is None:
            raise EngineError("the SGLang engine was not started")
        return self._loading

    def _connected(self) -> SglangClient:
        if self._client is None:
            raise EngineError("the SGLang engine was not started")
        return self._client
