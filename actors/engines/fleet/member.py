"""One place of a fleet: an engine, its failures, and the engines built after it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Literal

import structlog

from actors.engines.base import (
    NOTHING,
    CountsWork,
    Engine,
    Generation,
    GenerationRequest,
    HealthChecked,
    SharesDevice,
    TellsContext,
    TellsStart,
    WorkCounts,
)
from actors.engines.fleet.cache_use import CacheUse
from actors.engines.fleet.engine_state import EngineState, HostWeights, ScoredTokens
from actors.engines.fleet.pending_request import PendingRequest, left_of, sound
from actors.settings.fleet import FleetConfig
from bus.errors import ConfigError, EngineError, RequestRefusedError, SluiceError, WeightsKeptError
from bus.images import PlacedImage
from bus.waiting import bounded, first, retrieve_exception, set_within, unless

log = structlog.get_logger()
Build = Callable[[], Awaitable[Engine]]
"""Makes an engine that was not started yet."""
WEIGHTS_AGAIN_S = 2.0
"""Time until an engine without weights looks for them again."""
State = Literal["starting", "serving", "released", "stopping", "waiting", "given up", "left"]


class Member:
    """Keeps an engine in service: starts, updates, watches, takes down and builds it again."""

    def __init__(
        self, name: str, build: Build, config: FleetConfig, *,
        weights: Callable[[], HostWeights], changed: Callable[[], None],
    ) -> None:  # fmt: skip
        self.name = name
        self.state: State = "starting"
        self.requests: set[PendingRequest] = set()
        self.occupancy = Occupancy()
        self.served = 0
        self.restarts = 0
        self.reason = ""
        self.misconfigured: ConfigError | None = None
        """Set when the engine did not start for its settings."""
        self.cache_use = CacheUse(
            lambda: self._life.engine if self._life else None, hard_share=config.hard_kv_share
        )
        self.released = False
        """Whether the engine has freed, or is about to free, the device that it shares."""
        self.tried = asyncio.Event()
        """Set when the first engine serves or has failed."""
        self._build = build
        self._config = config
        self._weights = weights
        self._changed = changed
        self._life: EngineState | None = None
        self._asked: dict[str, asyncio.Task[Generation]] = {}
        self._idle = asyncio.Event()
        self._device = asyncio.Lock()
        """Held while an engine starts, and from `release` to `resume`, so that none starts meanwhile."""
        self._out = asyncio.Event()
        """Set when the engine must leave service, for a failure or for good."""
        self._full = False
        """Whether too few of the member's places have become free since it had none."""
        self._leaving = False
        self._restart_limit = RestartLimit(config)
        self._tokens_before = 0
        self._work_before = WorkCounts()

    @property
    def policy_version(self) -> int:
        """Return the version of the weights in service, -1 for none."""
        return self._life.engine.policy_version if self._life and self.state == "serving" else -1

    @property
    def running(self) -> int:
        return self._life.engine.running if self._life else 0

    @property
    def waiting(self) -> int:
        return self._life.engine.waiting if self._life else 0

    @property
    def load(self) -> int:
        """Places that are taken: also by what its engine has yet to abort."""
        return len(self.requests) + (len(self._life.ending) if self._life else 0)

    @property
    def longest_context(self) -> int | None:
        """Return the most tokens of a prompt and its answer together; None where its engine does not tell."""
        engine = self._life.engine if self._life else None
        return engine.longest_context if isinstance(engine, TellsContext) else None

    @property
    def request_limit(self) -> int:
        """Return the number of requests that may be here at once, for the sake of those under which engines
        have failed."""
        suspicion = max((pending.failures for pending in self.requests), default=0)
        return self._config.requests_after(suspicion)

    def has_capacity(self) -> bool:
        """Return whether a request may have a place here, of which those of a full engine become free
        together."""
        request_limit = self.request_limit
        self._full = self.load > request_limit - (self._config.refill_of(request_limit) if self._full else 1)
        return self.state == "serving" and self.policy_version >= 0 and not self._full

    @property
    def tokens_generated(self) -> int:
        return self._tokens_before + (self._life.engine.tokens_generated if self._life else 0)

    @property
    def starting(self) -> str:
        """Return what the engine does before it serves, in words; empty where that is not known."""
        engine = self._life.engine if self._life else None
        return engine.starting if isinstance(engine, TellsStart) else ""

    @property
    def work_counts(self) -> WorkCounts:
        engine = self._life.engine if self._life else None
        return self._work_before.plus(engine.work_counts if isinstance(engine, CountsWork) else WorkCounts())

    @property
    def has_ended(self) -> bool:
        return self.state in ("given up", "left")

    def add_request(self, pending: PendingRequest) -> None:
        self.requests.add(pending)
        self.cache_use.add(pending)
        self.served += 1
        self.occupancy.note(len(self.requests))

    def remove_request(self, pending: PendingRequest) -> None:
        self.requests.discard(pending)
        self.cache_use.remove(pending)
        self.occupancy.note(len(self.requests))

    async def live(self) -> None:
        """Serve until `leave`, or until too many engines failed here."""
        while not self._leaving:
            await self._serve()
            await self._take_down()
            self.tried.set()
            if not self._leaving and not await self._may_go_on():
                return
        self._enter("left")

    def leave(self) -> None:
        """Take the engine out of service for good; `live` then ends."""
        self._leaving = True
        self._out.set()

    def fail(self, reason: str, *, of_requests: bool = True) -> None:
        """Take the engine out of service, and build another; one of its requests may be what it failed of."""
        if not self._out.is_set():
            log.warning("engine_lost", engine=self.name, reason=reason, requests=len(self._asked))
            self.reason = reason
            if self._life is not None:
                self._life.failed_under = self._life.suspects(len(self._asked)) if of_requests else 0
            self._out.set()
            if self.state in ("serving", "released"):
                self._enter("stopping")

    async def work_on(self, pending: PendingRequest) -> None:
        """Add what the engine samples for `pending` to it; all troubles but a refusal cut the piece short.
        When it returns or raises, the engine works on it no more. Raises `RequestRefusedError`."""
        life = self._life
        if life is None or self.state != "serving" or pending.attempt_id is None:
            return
        request = pending.rest(pending.attempt_id)
        task = self._asked[request.request_id] = asyncio.create_task(life.engine.generate(request))
        task.add_done_callback(retrieve_exception)
        self._idle.clear()
        try:
            piece = await self._piece(life, request, task)
        finally:
            del self._asked[request.request_id]
            if not self._asked:
                self._idle.set()
        pending.pieces.append(piece)
        asked_to = self._leaving or self.released or pending.aborted
        if piece.finish_reason != "abort" or asked_to:
            return
        if life.failed_under:
            pending.failures, pending.alone = pending.failures + 1, life.failed_under == 1
        elif life.failed_under is None and not len(piece.token_ids):
            pending.errors += 1

    async def abort(self, request_id: str) -> None:
        await asyncio.sleep(0)  # a request that was asked for in this turn of the loop gets there first
        if self._life is not None and request_id in self._asked:
            try:
                async with asyncio.timeout(self._config.drain_timeout_s):
                    await self._life.engine.abort(request_id)
            except (EngineError, TimeoutError) as error:
                self.fail(f"the engine did not abort {request_id}: {error!r}")

    async def score(
        self, sequences: Sequence[Sequence[int]], images: Sequence[Sequence[PlacedImage]]
    ) -> ScoredTokens | None:
        """Return what the engine says of these tokens and images, with the version that it had all the time.
        None when it does not serve, cannot tell, or took other weights meanwhile."""
        life = self._life
        if life is None or self.state != "serving":
            return None
        version, timeout_s = self.policy_version, self._config.request_timeout_s
        logprobs = await life.score(sequences, images, name=self.name, timeout_s=timeout_s)
        return ScoredTokens(version, logprobs) if logprobs and self.policy_version == version else None

    async def update(self) -> float:
        """Load the newest weights unless they are there; return the seconds generation stood still. An engine
        that cannot has failed, and returns 0. Raises `WeightsKeptError` when there were none."""
        life, seconds = self._life, 0.0
        if life is None or self.state != "serving":  # an engine that starts takes the newest by itself
            return seconds
        try:
            async with life.update:
                if self.state == "serving" and life.serial != self._weights().serial:
                    seconds = await self._load(life)
        except WeightsKeptError:  # the engine serves on; who wants the update asks again
            raise
        # An engine of any kind may raise anything here, and the update of the others must go on: `fail`
        # logs it, and an engine that fails too often is given up, which `Fleet` raises.
        except Exception as error:  # noqa: BLE001
            if life is self._life:
                self.fail(f"new weights: {_reason(error)}", of_requests=False)
        return seconds

    async def release(self) -> None:
        """Have the engine hand out what it has sampled and free its device; none starts until `resume`. An
        engine that is starting is waited for. One that cannot free its device has failed: it is closed."""
        if self.released:
            return
        self.released = True
        await self._device.acquire()  # timeouts bound how long an engine starts
        if (life := self._life) is None:
            return
        if self.state == "serving":
            self._enter("released")
            try:
                await unless(self._out, self._free_device(life))
            # An engine of any kind may raise anything here. It concerns this engine alone: `fail` logs it,
            # has the engine closed and another one built, and the device is free afterwards.
            except Exception as error:  # noqa: BLE001
                self.fail(f"the engine did not free its device: {error!r}", of_requests=False)
        if self.state != "released" or self._out.is_set():
            await life.gone.wait()  # taking the engine down bounds this

    async def resume(self) -> None:
        """Take the device back, and serve with the newest weights. An engine that cannot has failed."""
        if not self.released:
            return
        try:
            if (life := self._life) is not None and self.state == "released":
                await unless(self._out, self._take_device(life))
                await self._load_newest(life)
                # Nothing is awaited between the last comparison and this, as when an engine begins to serve.
                if self.state == "released" and not self._out.is_set():
                    self._enter("serving")
        # An engine of any kind may raise anything here, which must not keep the others from resuming:
        # `fail` logs it and has the engine built again.
        except Exception as error:  # noqa: BLE001
            self.fail(f"the engine did not take its device back: {error!r}", of_requests=False)
        finally:
            self.released = False
            self._device.release()

    async def _free_device(self, life: EngineState) -> None:
        config = self._config
        async with bounded(config.update_timeout_s, f"{self.name} did not end its update"):
            await life.update.acquire()  # an engine that loads weights hands out nothing before that is over
        try:
            async with bounded(config.drain_timeout_s, f"{self.name} did not hand out its tokens"):
                await self._interrupt(life)
            async with bounded(config.update_timeout_s, f"{self.name} did not let it go"):
                if isinstance(life.engine, SharesDevice):
                    await life.engine.release()
        finally:
            life.update.release()

    async def _take_device(self, life: EngineState) -> None:
        """Weights first: an engine that has none on its device takes these with it, not the older ones."""
        await self._load_newest(life)
        async with bounded(self._config.update_timeout_s, f"{self.name} did not resume"):
            if isinstance(life.engine, SharesDevice):
                await life.engine.resume()

    def _ended(self, life: EngineState, task: asyncio.Task[Generation]) -> None:
        life.ending.discard(task)
        self._changed()

    def _enter(self, state: State) -> None:
        self.state = state
        self._changed()

    async def _serve(self) -> None:
        """Build an engine, bring it to the newest weights, serve until it must leave."""
        self._out = asyncio.Event()
        if self._leaving:
            return
        self._enter("starting")
        if await unless(self._out, self._device.acquire()):
            try:
                await self._begin_to_serve()
            finally:
                self._device.release()
        if not self._out.is_set():
            self.tried.set()
            await self._watch()

    async def _begin_to_serve(self) -> None:
        try:
            await unless(self._out, self._bring_up())
            if self._life:
                await self._load_newest(self._life)
        # Whatever keeps an engine from starting costs this engine alone: `fail` logs it, and an engine that
        # fails too often is given up, which `Fleet` raises.
        except Exception as error:  # noqa: BLE001
            self.misconfigured = error if isinstance(error, ConfigError) else None
            self.fail(_reason(error))
        if self._out.is_set():
            return
        # nothing is awaited between the comparison and this: who does not serve misses the next update
        self._enter("serving")
        log.info(
            "engine_restarted" if self._restart_limit.failures else "engine_ready",
            engine=self.name,
            policy_version=self.policy_version,
            at_s=time.monotonic(),  # by the host's clock, as the learner's holds of a shared device
        )

    async def _bring_up(self) -> None:
        async with bounded(self._config.start_timeout_s, f"{self.name} did not start"):
            engine = await self._build()
            self._life = EngineState(engine)
            await engine.start()

    async def _interrupt(self, life: EngineState) -> None:
        await asyncio.sleep(0)  # requests that were asked for in this turn of the loop get there first
        await asyncio.gather(*(life.engine.abort(request_id) for request_id in self._asked))
        if self._asked:
            await self._idle.wait()
        if life.ending:
            await asyncio.wait(life.ending)

    async def _load_newest(self, life: EngineState) -> None:
        while not self._out.is_set() and life.serial != self._weights().serial:
            await unless(self._out, self._load_patiently(life))

    async def _load_patiently(self, life: EngineState) -> None:
        try:
            await self._load(life)
        except WeightsKeptError as error:  # the learner may be starting again
            log.warning("weights_not_to_be_had", engine=self.name, reason=str(error))
            await set_within(self._out, WEIGHTS_AGAIN_S)

    async def _load(self, life: EngineState) -> float:
        return await life.load(self._weights(), name=self.name, timeout_s=self._config.update_timeout_s)

    async def _watch(self) -> None:
        """Return when the engine must leave service; look at its health now and then."""
        life = self._life
        assert life is not None, "the engine was brought up"
        while not await set_within(self._out, self._config.health_period_s):
            await self._check_health(life)
            self._changed()  # the cache may have emptied while no request ended

    async def _check_health(self, life: EngineState) -> None:
        if not isinstance(life.engine, HealthChecked):
            return
        try:
            async with bounded(self._config.health_timeout_s, f"{self.name} did not answer its health check"):
                await unless(self._out, life.engine.check_health())
        except EngineError as error:
            if life is self._life:
                self.fail(str(error))

    async def _doubt(self, life: EngineState, reason: str) -> None:
        """A request failed: the engine has, too, unless it is well and this was rare."""
        log.warning("generation_failed", engine=self.name, reason=reason)
        life.errors += 1
        if life is self._life and life.errors >= self._config.errors_in_a_row:
            self.fail(reason)
        if life is self._life and not self._out.is_set():
            await self._check_health(life)

    async def _piece(
        self, life: EngineState, request: GenerationRequest, task: asyncio.Task[Generation]
    ) -> Generation:
        try:
            await first(task, life.gone, self._config.request_timeout_s)
            if not task.done() and not life.gone.is_set():
                await self.abort(request.request_id)
                await first(task, life.gone, self._config.drain_timeout_s)
                if not task.done():
                    self.fail(f"the engine goes on with {request.request_id} though that was aborted")
                    await life.gone.wait()  # `_take_down` bounds this
            piece = sound(request, task.result()) if task.done() else NOTHING
            life.errors = 0
        except RequestRefusedError:
            raise
        except EngineError as error:
            await self._doubt(life, str(error))
            return left_of(request, error)
        else:
            return piece
        finally:
            if not task.done():  # our caller was cancelled, or the engine is gone
                task.cancel()
                life.ending.add(task)
                task.add_done_callback(partial(self._ended, life))
                await asyncio.wait([task], timeout=0 if life.gone.is_set() else self._config.drain_timeout_s)
                if not task.done() and life is self._life:
                    self.fail(f"the engine goes on with {request.request_id} though that was cancelled")

    async def _take_down(self) -> None:
        life = self._life
        if life is None:
            return
        self._enter("stopping")
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                aborts = (life.engine.abort(request_id) for request_id in self._asked)
                await asyncio.gather(*aborts, return_exceptions=True)  # closing ends what they do not
                if self._asked:
                    await self._idle.wait()
        except TimeoutError:
            log.warning("engine_not_drained", engine=self.name, requests=len(self._asked))
        try:
            async with bounded(self._config.close_timeout_s, f"{self.name} did not close"):
                await life.engine.close()
        except EngineError as error:
            log.error("engine_not_closed", engine=self.name, reason=str(error))
        if self._asked:  # closing ended them, with what it knew of their tokens
            await set_within(self._idle, self._config.drain_timeout_s)
        life.gone.set()
        self._tokens_before, self._work_before = self.tokens_generated, self.work_counts
        self._life = None

    async def _may_go_on(self) -> bool:
        """Wait before the next engine; return False when too many failed."""
        pause_s = self._restart_limit.pause_after_failure_s(asyncio.get_running_loop().time())
        if pause_s is None:
            failures = self._restart_limit.failures
            log.error("engine_given_up", engine=self.name, failures=failures, reason=self.reason)
            self._enter("given up")
            return False
        self.restarts += 1
        self._out = asyncio.Event()
        self._enter("waiting")
        await set_within(self._out, pause_s)
        return True


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, SluiceError) else repr(error)


class Occupancy:
    """Sums over the time so far: differences of two readings say how idle an engine was in between."""

    def __init__(self) -> None:
        self._busy_s = self._request_s = self._since_s = 0.0
        self._count = 0

    def note(self, count: int) -> None:
        now_s = asyncio.get_running_loop().time()
        self._busy_s, self._request_s = self._until(now_s)
        self._since_s, self._count = now_s, count

    @property
    def busy_s(self) -> float:
        """Return the seconds with one request or more."""
        return self._until(asyncio.get_running_loop().time())[0]

    @property
    def request_s(self) -> float:
        """Return the seconds of each request, added up: over a span of time, its mean number of requests."""
        return self._until(asyncio.get_running_loop().time())[1]

    def _until(self, now_s: float) -> tuple[float, float]:
        passed_s = now_s - self._since_s if self._count else 0.0
        return self._busy_s + passed_s, self._request_s + passed_s * self._count


class RestartLimit:
    """Counts the failures of the engines of one place within `restart_window_s`."""

    def __init__(self, config: FleetConfig) -> None:
        self._config = config
        self._failures_s: list[float] = []

    @property
    def failures(self) -> int:
        """Return the number of failures that counted when the latest one was noted."""
        return len(self._failures_s)

    def pause_after_failure_s(self, now_s: float) -> float | None:
        """Note a failure; return the pause before the next engine in seconds, None when none may follow."""
        self._failures_s = [at for at in self._failures_s if now_s - at < self._config.restart_window_s]
        self._failures_s.append(now_s)
        if len(self._failures_s) > self._config.restarts:
            return None
        return self._config.backoff_after_s(len(self._failures_s))
