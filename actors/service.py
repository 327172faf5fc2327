"""`launch actors`: the engines, the rollout workers and the evaluator of one host, in one process."""

import asyncio
import os
import platform
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import structlog
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from actors.colocation import DeviceSharing, able_to_release
from actors.config import ActorsConfig, SamplingConfig
from actors.counters import report_metrics
from actors.engines.base import Engine, Sampling
from actors.engines.build import build_engine, evaluation_engine
from actors.engines.fleet.engine_admin import EngineAdmin, attached_builds
from actors.engines.fleet.engine_claims import EngineClaims
from actors.engines.fleet.fleet import Fleet
from actors.environments.base import Closable, Environment
from actors.environments.build import build_environment
from actors.evaluation.engines import EvaluationEngines, OwnEngine, RolloutEngines
from actors.evaluation.evaluator import Evaluator
from actors.policy.policy import Policy
from actors.rewards.group_filters import GroupFilter, load_filter
from actors.weights.follow import PolicyFollower, obtain_model
from actors.weights.probe import ProbeCheck
from actors.worker import Worker
from bus.codec import Json
from bus.config import ColocationConfig
from bus.connection import Bus
from bus.errors import BusAwayError, ConfigError, EngineLostError
from bus.messages import PolicyManifest, SnapshotWanted
from bus.pace import follow_pace
from bus.process_tuning import few_collections
from bus.status import report_status
from bus.waiting import RETRY_S, set_within
from storage.weights.blob_sources import BlobSource, blob_source

log = structlog.get_logger()
NOTHING_ANNOUNCED = SnapshotWanted(incarnation="", policy_version=-1, reason="no policy is announced")


@dataclass(frozen=True)
class ActorSettings:
    """What one actor process needs to know."""

    actors: ActorsConfig
    sampling: SamplingConfig
    shards: int
    logs: Path
    """Directory for what an engine in a process of its own prints."""
    colocation: ColocationConfig = field(default_factory=ColocationConfig)
    """Whether its engines share the devices of this host with the learner."""


async def run_actors(bus: Bus, settings: ActorSettings, stop: asyncio.Event) -> None:
    """Roll out until `stop`, or until the learner says that it is done."""
    await follow_pace(bus)
    environment = build_environment(settings.actors.environment)
    keep = load_filter(settings.actors.group_filter)
    manifest = await _first_policy(bus, settings.actors.patience_s, stop)
    if manifest is None:
        return
    async with AsyncExitStack() as open_parts:
        if isinstance(environment, Closable):
            open_parts.push_async_callback(environment.close)
        directory = open_parts.enter_context(tempfile.TemporaryDirectory(prefix="sluice-model-"))
        blobs = await open_parts.enter_async_context(blob_source(bus, settings.actors.weights))
        model = await obtain_model(
            bus, manifest, Path(directory), patience_s=settings.actors.patience_s, stop=stop
        )
        if model is None:
            return
        claimed = EngineClaims.open(bus, actor_name(), settings.actors.engine)
        claims = await open_parts.enter_async_context(claimed)
        engine = _fleet(settings, model)
        try:
            if settings.colocation.enabled:
                sharing = DeviceSharing(bus, engine, settings.colocation, actor=actor_name())
                await open_parts.enter_async_context(sharing.active())
            if not await _started(bus, engine, stop):
                return
            open_parts.enter_context(few_collections())
            actor = _actor(bus, settings, engine, blobs, model, environment, keep, claims)
            await actor.run(stop, groups_at_once=settings.actors.groups_at_once)
        finally:
            await engine.close()


def _actor(
    bus: Bus, settings: ActorSettings, engine: Fleet, blobs: BlobSource, model: Path,
    environment: Environment, keep: GroupFilter, claims: EngineClaims,
) -> "_Actor":  # fmt: skip
    """Put the parts of an actor together around engines that have started."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    sampled = Sampling.from_config(settings.sampling, stop_tokens(model, tokenizer))
    greedy = replace(sampled, temperature=0.0, top_p=1.0, top_k=0)
    from_learner = getattr(settings.actors.engine, "update", "") == "group"
    probe = ProbeCheck(engine, bound_nats=settings.actors.probe_bound_nats)
    follower = PolicyFollower(
        bus, engine, blobs, loads_at_once=2, from_learner=from_learner, on_loaded=probe.loaded
    )
    worker = Worker(
        bus,
        Policy(
            engine,
            tokenizer,
            sampled,
            mask_older_versions=settings.actors.mask_older_versions,
            routed_experts=settings.actors.engine.routed_experts,
            tool_calls=settings.actors.tool_calls,
        ),
        environment,
        follower=follower,
        keep=keep,
        shards=settings.shards,
        name=actor_name(),
        share_after_s=settings.actors.share_after_s,
    )
    at_once = settings.actors.evaluation.prompts_at_once
    answering: EvaluationEngines = (
        RolloutEngines(bus, engine, follower, prompts_at_once=at_once)
        if settings.actors.evaluates_on == "rollout"
        else OwnEngine(partial(evaluation_engine, settings.actors.engine, model), blobs)
    )
    evaluator = Evaluator(
        bus, answering, tokenizer, environment,
        sampled=sampled, greedy=greedy, tool_calls=settings.actors.tool_calls,
    )  # fmt: skip
    admin = EngineAdmin(
        bus, engine, settings.actors.engine, model, claims,
        actor=actor_name(), colocated=settings.colocation.enabled,
    )  # fmt: skip
    return _Actor(bus, engine, follower, probe, worker, evaluator, admin, claims)


class _Actor:
    """The parts of an actor process, run together, and what they show."""

    def __init__(
        self, bus: Bus, engine: Fleet, follower: PolicyFollower, probe: ProbeCheck, worker: Worker,
        evaluator: Evaluator, admin: EngineAdmin, claims: EngineClaims,
    ) -> None:  # fmt: skip
        self._bus = bus
        self._engine = engine
        self._follower = follower
        self._probe = probe
        self._worker = worker
        self._evaluator = evaluator
        self._admin = admin
        self._claims = claims
        self._seen = (time.monotonic(), 0)

    async def run(self, stop: asyncio.Event, *, groups_at_once: int) -> None:
        finished = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follower.run(finished))
            tasks.create_task(self._probe.run(finished))
            tasks.create_task(
                report_status(
                    self._bus,
                    source=actor_name(),
                    role="actor",
                    look=self._look,
                    stop=finished,
                    waits_for=self._waits_for,
                )
            )
            tasks.create_task(
                report_metrics(self._bus, source=actor_name(), look=self._counters, stop=finished)
            )
            tasks.create_task(self._admin.run(finished))
            tasks.create_task(self._claims.run(finished))
            tasks.create_task(self._stop_when_done(stop))
            try:
                async with asyncio.TaskGroup() as work:
                    work.create_task(self._worker.run(stop, groups_at_once=groups_at_once))
                    work.create_task(self._evaluator.run(stop))
            finally:
                finished.set()

    async def _stop_when_done(self, stop: asyncio.Event) -> None:
        """A run that was done before this process came may be going on soon; one that gets done is over."""
        trained = False
        while not stop.is_set():
            if self._engine.failure:
                raise EngineLostError(self._engine.failure)
            trained = trained or self._follower.stage in ("warmup", "rl")
            if trained and self._follower.stage == "done":
                log.info("run_is_done")
                stop.set()
            await set_within(stop, RETRY_S)

    def _waits_for(self) -> str:
        if self._follower.stage == "done":
            return ""
        return "" if self._engine.policy_version >= 0 else "weights of its engines"

    def _counters(self) -> tuple[int, dict[str, Json]]:
        engine = self._engine
        return max(0, engine.policy_version), {
            "engine/count": len(engine.engines),
            "engine/busy_s": engine.busy_s,
            "engine/request_s": engine.request_s,
            "engine/tokens": engine.tokens_generated,
            "engine/pause_s": self._follower.pause_s,
            "engine/receive_s": self._follower.receive_s,
            **({"engine/probe_nats": max(self._probe.nats.values())} if self._probe.nats else {}),
        }

    def _look(self) -> tuple[str, dict[str, Json]]:
        engine = self._engine
        before, tokens = self._seen
        now = time.monotonic()
        rate = (engine.tokens_generated - tokens) / max(now - before, 1e-9)
        if now - before > 1.0:
            self._seen = (now, engine.tokens_generated)
        doing = "generating" if engine.running else "waiting for leases"
        if engine.released:
            doing = "waiting while the learner has the device"
        if not engine.running and self._follower.stage == "warmup":
            doing = "waiting for the warm-up to end"
        if self._evaluator.doing:
            doing = f"{doing}, {self._evaluator.doing}"
        return doing, {
            "running": engine.running,
            "waiting": engine.waiting,
            "tokens_generated": engine.tokens_generated,
            "generated_tokens_per_s": rate,
            "policy_version": engine.policy_version,
            "pause_s": self._follower.pause_s,
            "engines": engine.engines,
            "alarm": "; ".join(self._probe.alarms.values()),
            **self._worker.counts,
        }


def _fleet(settings: ActorSettings, model: Path) -> Fleet:
    """Return the engines of this process, not started."""
    engine, builds = settings.actors.engine, {}
    if settings.colocation.enabled:
        engine = able_to_release(engine)
    for number in range(settings.actors.fleet.engines):
        log_file = settings.logs / f"engine-{number}-{actor_name()}.log"
        build = partial(build_engine, engine, model, log_file, number=number)
        builds[f"engine-{number}"] = partial(asyncio.to_thread, build)
    return Fleet(attached_builds(engine, model) or builds, settings.actors.fleet)


def actor_name() -> str:
    """Return this process among the run's actors."""
    return f"actor-{platform.node()}-{os.getpid()}"


def stop_tokens(model: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return every token that ends an answer, by the model's config and by the tokenizer."""
    configured = AutoConfig.from_pretrained(model).eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    found = {token for token in [*ids, tokenizer.eos_token_id] if token is not None}
    if not found:
        raise ConfigError("neither the model's config.json nor its tokenizer names an end token (eos_token)")
    return tuple(sorted(found))


async def _started(bus: Bus, engine: Engine, stop: asyncio.Event) -> bool:
    """Start the engine, which may take minutes; return False when `stop` came first."""
    finished = asyncio.Event()
    showing = asyncio.create_task(
        report_status(
            bus,
            source=actor_name(),
            role="actor",
            look=lambda: ("starting its engine", {}),
            stop=finished,
            waits_for=lambda: "its engine to start",
        )
    )
    starting, stopping = asyncio.create_task(engine.start()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({starting, stopping, showing}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        finished.set()
        if not starting.done():
            starting.cancel()
        stopping.cancel()
        await asyncio.wait({starting, stopping, showing})
    showing.result()
    if starting.cancelled():
        return False
    starting.result()
    return True


async def _first_policy(bus: Bus, patience_s: float, stop: asyncio.Event) -> PolicyManifest | None:
    """Return the first policy manifest, or None on `stop`. Raises `BusAwayError` after `patience_s`."""
    finished = asyncio.Event()
    waiting = "waiting for the learner's first policy version"
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(
            report_status(
                bus,
                source=actor_name(),
                role="actor",
                look=lambda: (waiting, {}),
                stop=finished,
                waits_for=lambda: "the learner's first policy version",
            )
        )
        try:
            deadline = time.monotonic() + patience_s
            while time.monotonic() < deadline:
                found = await bus.get("policy", PolicyManifest)
                if found is not None or stop.is_set():
                    return found[0] if found else None
                await bus.notify(bus.subject("notice", "snapshot"), NOTHING_ANNOUNCED)
                await set_within(stop, RETRY_S * bus.slower)
        finally:
            finished.set()
    raise BusAwayError(f"waited {patience_s:g} s for a policy: is `launch learner` running for this run?")
