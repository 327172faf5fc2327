"""SGLang behind the Engine protocol: a server that is started and watched, or attached to."""

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar

import structlog
import torch

from actors.engines.announced_version import Published
from actors.engines.base import (
    NOTHING,
    Generation,
    GenerationRequest,
    InterruptedGenerationError,
    KvTokens,
    WorkCounts,
)
from actors.engines.expert_routing import Routing
from actors.engines.served_adapters import ServedAdapters
from actors.engines.sglang.adapter_updates import AdapterUpdates
from actors.engines.sglang.adapters import Adapters, serving
from actors.engines.sglang.client.answers import Streamed
from actors.engines.sglang.client.cache_loads import CacheLoads
from actors.engines.sglang.client.client import AdapterMissingError, SglangClient, UnreachableError
from actors.engines.sglang.client.request_bodies import score_request
from actors.engines.sglang.client.sent_images import SentImages
from actors.engines.sglang.client.server_facts import ServerFacts
from actors.engines.sglang.client.weight_labels import OtherWeightsError
from actors.engines.sglang.loading import Load, Loading
from actors.engines.sglang.pair import server_of
from actors.engines.sglang.requests_in_progress import RequestInProgress, RequestsInProgress
from actors.engines.sglang.served_policy import ServedPolicies, ServedPolicy
from actors.engines.sglang.server.server import DYING_S, HealthChecks, Server
from actors.engines.sglang.weights import HeldWeights
from actors.settings.engines import SglangEngineConfig
from bus.errors import EngineError, RequestRefusedError
from bus.images import PlacedImage
from bus.process.work_progress import long_work
from bus.waiting import cancelled, left_s


async def load_paused(
    load: Load, client: SglangClient, facts: ServerFacts, config: SglangEngineConfig,
    in_progress: RequestsInProgress,
) -> tuple[int, float]:  # fmt: skip
    """Run `load` while nothing is generated; return the version that it loads, and the seconds it took.

    Afterwards no request without a token is at the server that could find prefixes of older weights: those
    that waited were ended, and are sent again, or with `retract` the server has dropped all prefixes. A
    server that does not stream hides which requests wait: tokens of all that it has count as sampled over
    older keys and values.

    No request may be sent meanwhile. Raises `EngineError`, as `load` does."""
    end_s = time.monotonic() + config.update_timeout_s  # of all that follows together
    interrupts = config.adapter == "loaded"  # frozen weights change: requests are of one version each
    if config.pause == "drain" and not interrupts:
        await in_progress.drained(config.update_timeout_s)
    mode = config.pause if config.pause != "drain" and facts.reports_spans and not interrupts else None
    if mode == "in_place" and facts.role == "null":  # a pair hands its prompts over, or ends them
        # A request that waits is of the salt of the version before, whose prefixes it would find.
        await in_progress.interrupt(left_s(end_s), only=lambda request: request.may_wait)
    begun = time.perf_counter()
    if mode is None:
        await in_progress.interrupt(left_s(end_s))  # no answer may span the update
    else:
        in_progress.weights_change()
        await client.pause(mode)
    stopped = time.perf_counter()
    try:
        version = await load(mode == "retract", end_s)
    finally:
        loaded = time.perf_counter()
        if mode is not None:
            await client.resume()
    pause_s = time.perf_counter() - begun
    log.debug("weights_loaded", stop_s=round(stopped - begun, 4), load_s=round(loaded - stopped, 4))
    return version, pause_s


log = structlog.get_logger()
T = TypeVar("T")
SCORE_TIMEOUT_S = 60.0


class SglangEngine:
    """Serves one model through one SGLang server, or a pair of them, for as long as that lives.

    Requests wait for the first weights. When the server ends, hangs or does not take weights, all of its
    processes are killed, the requests in flight raise EngineError and so does every call after it: the fleet
    builds another engine."""

    def __init__(
        self, model_dir: Path, config: SglangEngineConfig, log_file: Path, *, first_gpu: int = 0,
        served: ServedAdapters | None = None,
    ) -> None:  # fmt: skip
        """`served`: adapters that the server itself adds to its weights (`adapter = "loaded"`)."""
        self.failure = ""
        """Why the engine has stopped for good; empty before."""
        self.in_progress = RequestsInProgress(self._connected)
        self.up = asyncio.Event()
        """Set once the server has started, or is attached to."""
        self._config = config = serving(config, served)
        self._served = served
        self.policies = ServedPolicies()
        """The engine's own policy, and further ones at the server."""
        self._own = self.policies.own
        self._updates: AdapterUpdates | None = None
        self._images = SentImages.of(model_dir)
        self._held = HeldWeights(model_dir, config.weights_directory)
        self._server: Server = server_of(config, self._held.directory, log_file, first_gpu)
        self._client: SglangClient | None = None
        self._facts: ServerFacts | None = None
        self._loading: Loading | None = None
        self._routing = Routing.of_model(model_dir) if config.routed_experts else None
        self._changing = asyncio.Lock()
        """Held while weights are loaded, and while memory is released or taken back."""
        self._health = HealthChecks(config, self._server, self._connected, busy=self._busy, well=self._open)
        self._released = False
        self._watcher: asyncio.Task[None] | None = None
        self._loads_of_cache = CacheLoads()
        self._looking_at_cache: asyncio.Task[None] | None = None

    @property
    def policy_version(self) -> int:
        return self._own.version

    @property
    def tokens_generated(self) -> int:
        return self._own.tokens_generated

    @property
    def running(self) -> int:
        return self.in_progress.running(self._own)

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait for weights, or for a look at a silent server."""
        return self.in_progress.waiting(self._own)

    @property
    def requests_of_others(self) -> int:
        """Return the number of requests for other policies at the server, or when it failed."""
        return self.in_progress.of_others(self._own)

    @property
    def longest_context(self) -> int | None:
        """Return the most tokens of a prompt and its answer together; None before the server has said it."""
        return None if self._facts is None else self._facts.longest_prompt

    @property
    def kv_tokens(self) -> KvTokens | None:
        """Return how full the server's cache is; None where it does not say."""
        return self._loads_of_cache.tokens

    @property
    def work_counts(self) -> WorkCounts:
        return WorkCounts() if self._client is None else self._client.work_counts

    @property
    def starting(self) -> str:
        """Return what the server does before it serves; empty once it does."""
        return "" if self.up.is_set() else self._server.phase

    @property
    def url(self) -> str:
        return self._connected().url

    async def start(self) -> None:
        """Start the server, or attach; it generates when weights are loaded. Raises ConfigError for settings
        that this SGLang does not have, EngineError with the server's last lines when it does not come up."""
        self._client = await self._server.start()
        with long_work("waiting until SGLang serves"):
            await self._server.until_ready(self._client)
        self._facts = await self._client.facts()
        self._loading = Loading(self._held, self._client, self._facts)
        self._loading.check(self._config)
        if self._served is not None:
            self._own.adapters = await self.checked_adapters(self._served)
            self._updates = AdapterUpdates(
                self._config, self.policies, self._loading, paused=self._paused, or_fail=self._or_fail
            )
        log.info("sglang_ready", url=self.url, version=self._facts.version)
        self._facts.refuse_silence(self._config, self.url, of_experts=self._routing is not None)
        self._facts.refuse_stored_prefixes(self._config.pause, self.url)
        self._facts.refuse_retraction(self._config.pause, self.url)
        self._facts.warn_of_silence_of_versions(self._config.pause)
        self._watcher = asyncio.create_task(self._watch())
        self._watcher.add_done_callback(self._watching_ended)
        if self._facts.tells_loads:
            self._looking_at_cache = asyncio.create_task(self._loads_of_cache.watch(self._client))
        self.up.set()

    async def generate(self, request: GenerationRequest, policy: ServedPolicy | None = None) -> Generation:
        """Continue `request`; waits for the first weights. Cancelling the caller aborts the request. An
        update may end it with the tokens so far, where a server says of no token which weights drew it. With
        `policy` it is for one that is served beside the engine's own."""
        with self.in_progress.new(request, policy or self._own) as flight:
            flight.request = await self._images.prepared(request)
            while flight.begins_again(generation := await self._send(flight, policy or self._own)):
                self.in_progress.renew(flight)
            return generation

    async def load_weights(
        self, state: Mapping[str, torch.Tensor], policy_version: int, policy: ServedPolicy | None = None
    ) -> float:
        """Take the tensors (HF names; the first time all of them); return the seconds generation stood still.
        Without any the smallest is sent again: the server learns of a version with tensors only. Raises
        EngineError for another model's tensors, and when the server fails at it: then it is killed."""
        async with self._changing:
            self._check()
            if self._updates is not None:
                return await self._updates.take(policy or self._own, state, policy_version)
            if not self._released:
                load = await self._ready().tensors(self._config, state, policy_version)
                return await self._swap(load, policy_version)
            self._ready().hold(state, policy_version)
            self._own.taken(policy_version)  # `resume` loads it
        return 0.0

    async def load_published(self, published: Published) -> float:
        """Have the learner send the weights to the server; where that fails, fetch and load them. Returns and
        raises as `load_weights`, and WeightsKeptError when they could not be had at all."""
        async with self._changing:
            self._check()
            if self._ready().has(published, self._own.version):
                return 0.0
            load = await self._ready().published(self._config, published)
            return await self._swap(load, published.policy_version)

    async def release(self) -> None:
        """Free the device: weights, caches and graphs. Nothing may be in flight; new requests wait. Weights
        that are loaded meanwhile are kept on the host. Raises EngineError when the server fails at it: then
        it is killed, which frees the device too; and for weights that only the learner has."""
        async with self._changing, self._health.looking:  # looks generate: the server must be idle
            self._check()
            if self._config.update == "group" or self._updates is not None:
                which = "adapters" if self._updates else "weights from the learner"
                raise EngineError(f"the server has {which}, which it could not take back from here")
            self.policies.shut()
            self._released = True
            await self._or_fail(self._connected().release(self._config.update_timeout_s), "free its device")

    async def resume(self) -> None:
        """Take the device back, with the weights loaded last; what was on the device is gone."""
        async with self._changing:
            self._check()
            if not self._released:
                return
            await self._or_fail(self._retake(), "take its device back")
            self._released = False
            self._own.loads += 1
            self._own.open()

    async def score(
        self, sequences: Sequence[Sequence[int]], images: Sequence[Sequence[PlacedImage]] = (),
        policy: ServedPolicy | None = None,
    ) -> list[list[float]]:  # fmt: skip
        """Return for each sequence the nats of all its tokens but the first and those of its `images`. Raises
        EngineError."""
        self._check()
        client = self._connected()
        adapters = (policy or self._own).adapters
        adapter = adapters.present().name if adapters else ""
        requests = [
            await self._images.prepared(score_request(tokens, shown))
            for tokens, shown in zip_longest(sequences, images, fillvalue=())
        ]
        asked = (client.score(one, adapter=adapter, timeout_s=SCORE_TIMEOUT_S) for one in requests)
        return list(await asyncio.gather(*asked))

    async def abort(self, request_id: str) -> None:
        """End one request now: its `generate` returns the tokens so far. Unknown ids are ignored."""
        await self.in_progress.abort(request_id)

    async def check_health(self) -> None:
        """Raise EngineError when the server has failed; it is looked at all the time."""
        self._check()

    async def close(self) -> None:
        """End the server if it is ours; requests in flight raise EngineError."""
        self._stop_for_good("it was closed")
        await cancelled(*filter(None, (self._watcher, self._looking_at_cache)))
        await self.in_progress.aborted()
        await self._server.kill()
        if self._loading is not None:
            await self._loading.close()
        if self._client is not None:
            await self._client.close()
        self._held.close()

    async def checksums(self) -> dict[str, str]:
        """Return the server's checksum of each of its parameters: proof of what it computes with."""
        return await self._connected().checksums()

    async def checked_adapters(self, served: ServedAdapters, *, policy: str = "") -> Adapters:
        """Return the adapters of one policy, of which none is loaded yet. Raises `ConfigError` for some that
        the server cannot have, `EngineError` when it has failed."""
        self._check()
        assert self._facts is not None, "set together with the client"
        found = Adapters(self._connected(), self._facts, served, self.in_progress, policy=policy)
        await found.check(has_experts=self._held.has_experts)
        return found

    # A request's way.

    async def _send(self, flight: RequestInProgress, policy: ServedPolicy) -> Generation:
        await flight.admitted(policy.serving)
        self._check()
        if flight.failure:
            raise EngineError(f"request {flight.request.request_id}: {flight.failure}")
        if flight.aborted.is_set():
            return NOTHING
        request, timeout_s = flight.request, self._config.request_timeout_s
        flight.adapter = policy.adapter
        version = flight.adapter.policy_version if flight.adapter else policy.version
        flight.streamed = Streamed(request, version) if self._streams else None
        flight.kv_version = None if self._config.pause == "retract" else version
        flight.sent = asyncio.create_task(
            self._connected().generate(
                request, rid=flight.rid, salt=policy.salt, timeout_s=timeout_s, routing=self._routing,
                streamed=flight.streamed, adapter=flight.adapter_name,
            )
        )  # fmt: skip
        try:
            await asyncio.wait({flight.sent})
        except asyncio.CancelledError:
            self.in_progress.abandon(flight)
            raise
        if flight.failure:
            failed = f"request {request.request_id}: the SGLang server failed: {flight.failure}"
            raise self._interrupted(flight, failed)
        try:
            generation = flight.answer(flight.sent.result())
        except RequestRefusedError:
            self.in_progress.abandon(flight)  # the other server of a pair may have taken it
            raise
        except AdapterMissingError as error:
            self.in_progress.abandon(flight)
            await self._fail(f"the server has lost an adapter, as one that was started again: {error}")
            raise self._interrupted(flight, self.failure) from error
        except OtherWeightsError as error:
            self.in_progress.disown()
            await self._fail(str(error))
            raise self._interrupted(flight, self.failure) from error
        except EngineError as error:
            self.in_progress.abandon(flight)  # the server may be too slow only, or the connection broke
            if isinstance(error, UnreachableError):
                await self._looked_at(policy)
            raise self._interrupted(flight, self.failure or str(error)) from error
        policy.tokens_generated += len(generation.token_ids)
        return generation

    def _interrupted(self, flight: RequestInProgress, reason: str) -> InterruptedGenerationError:
        """Return the error of a request that ends before its time, with the tokens that are left of it."""
        left = flight.left()
        flight.policy.tokens_generated += len(left.token_ids)
        return InterruptedGenerationError(reason, left)

    async def _looked_at(self, policy: ServedPolicy) -> None:
        """Doubt the server; return when it serves or has failed: requests learn of that together."""
        self.policies.shut()
        self._health.doubt()
        await policy.serving.wait()  # the health checks' own timeouts bound this, and those of updates

    @property
    def _streams(self) -> bool:
        return self._config.stream_interval > 0 and self._facts is not None and self._facts.streams

    # Weights.

    async def _swap(self, load: Load, wanted: int) -> float:
        """Make the server compute with what `load` has it take; return the seconds it stood still."""
        version, pause_s = await self._or_fail(self._paused(load), f"take policy version {wanted}")
        self._own.taken(version)
        self._own.open()
        await self._ready().taken()
        return pause_s

    async def _paused(self, load: Load) -> tuple[int, float]:
        """Run `load` while nothing is generated; return what it does, and how many seconds that took."""
        self.policies.shut()
        assert self._facts is not None, "set together with the client"
        return await load_paused(load, self._connected(), self._facts, self._config, self.in_progress)

    async def _retake(self) -> None:
        """The server's weights are arbitrary at first, and its caches empty."""
        client, end_s = self._connected(), time.monotonic() + self._config.update_timeout_s
        await client.retake(("weights",), left_s(end_s))
        await self._ready().again(self._config, end_s)
        await client.retake(("kv_cache", "cuda_graph"), left_s(end_s))

    async def _or_fail(self, doing: Awaitable[T], what: str) -> T:
        """Return the result; a server that cannot is killed, and one that died meanwhile has none."""
        try:
            result = await doing
        except EngineError as error:
            died = isinstance(error, UnreachableError) and await self._server.ended(within_s=DYING_S)
            await self._fail(f"the server did not {what}: {died or error}")
            raise EngineError(self._stopped()) from error
        self._check()
        return result

    # The server's life.

    async def _watch(self) -> None:
        await self._fail(await self._health.until_it_fails())

    def _watching_ended(self, watcher: asyncio.Task[None]) -> None:
        if not watcher.cancelled() and (error := watcher.exception()):
            self._stop_for_good(f"the server is watched no more: {error!r}")

    async def _fail(self, reason: str) -> None:
        if not self.failure:
            log.warning("sglang_failed", reason=reason)
        self._stop_for_good(reason)
        await self._server.kill()

    def _busy(self) -> bool:
        """Return whether the server cannot generate now, and must not be asked to."""
        return self._released or self._changing.locked()

    def _open(self) -> None:
        if not self._busy():
            self.policies.open()

    def _stop_for_good(self, reason: str) -> None:
        self.failure = self.failure or reason
        self.in_progress.fail(self.failure)
        self.policies.end()

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
