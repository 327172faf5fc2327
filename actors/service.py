"""`launch actors`: the engines, the rollout workers and the evaluator of one host, in one process."""

import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from actors.colocation import DeviceSharing, able_to_release
from actors.config import ActorsConfig, SamplingConfig
from actors.counters import report_metrics
from actors.engine_report import EngineReport
from actors.engine_start import Startable, started
from actors.engines.base import Engine, Sampling
from actors.engines.build import engine_builds, refuse_unfit_model
from actors.engines.config import EngineConfig, refuse_inexact
from actors.engines.fleet.engine_admin import EngineAdmin, attached_builds
from actors.engines.fleet.engine_claims import EngineClaims
from actors.engines.fleet.fleet import Fleet
from actors.engines.gpu_plan import gpu_plan
from actors.engines.on_policy import tells_unscaled_logprobs
from actors.environment_report import environment_report, idle_text
from actors.environments.base import Environment, RunsOnDemand
from actors.environments.clients import ClientsEnvironment
from actors.evaluation.actor import EvaluatingActor
from actors.evaluation.dedicated import beside_rollouts, exact_engine, refuse_unfit_servers
from actors.evaluation.engines import EvaluationEngines, OwnEngine, RolloutEngines
from actors.evaluation.evaluator import Evaluator
from actors.evaluation.text_completions import chat_endpoints
from actors.first_policy import actor_name, first_policy
from actors.further_policies.engines import FurtherEngines
from actors.further_policies.further_policy import FurtherPolicy, FurtherSettings, PolicyOpener
from actors.further_policies.shared_servers import SharedServers, shared_servers
from actors.lease_admission import LeaseAdmission
from actors.opponents.opponents import Opponents
from actors.policy.cut_off_sampling import warn_of_cut_off_sampling
from actors.policy.policy import Policy
from actors.policy.sampling_masks import told_by
from actors.rewards.group_filters import GroupFilter, load_filter
from actors.run_end import stop_when_done
from actors.weights.follow import PolicyFollower, obtain_model
from actors.weights.probe import ProbeCheck
from actors.worker import Worker
from bus.codec import Json
from bus.config import ColocationConfig
from bus.connection import Bus
from bus.errors import ConfigError
from bus.pace import follow_pace
from bus.policy_names import DEFAULT_POLICY
from bus.process_tuning import few_collections, quick_turns
from bus.status import report_status
from storage.images.chat import ImageChat
from storage.weights.blob_sources import BlobSource, blob_source


@dataclass(frozen=True)
class ActorSettings:
    """What one actor process needs to know."""

    actors: ActorsConfig
    sampling: SamplingConfig
    shards: int
    max_staleness: int
    """Versions that a trajectory may lag the learner."""
    logs: Path
    """Directory for what an engine in a process of its own prints."""
    colocation: ColocationConfig = field(default_factory=ColocationConfig)
    """Whether its engines share the devices of this host with the learner."""
    gateway_token: str | None = field(default=None, repr=False)
    """What clients of `launch gateway` must know; None on a bus without credentials."""
    further: Mapping[str, FurtherSettings] = field(default_factory=dict)
    """Policies that the run trains beside its own, by name."""
    exact: bool = False
    """Whether engines that roll out give the learner's log-probs to the bit (model.numerics)."""
    rollout_engine: EngineConfig | None = None
    """Settings of engines that roll out, where those of opponents and evaluations are others."""

    @property
    def engine(self) -> EngineConfig:
        """Return the settings of its engines; those that only evaluate keep exactly one version."""
        if self.actors.evaluation.only:
            return exact_engine(self.actors.engine)
        return told_by(self.rollout_engine or self.actors.engine, self.sampling)

    @property
    def unscaled(self) -> set[str]:
        """Return the names of policies whose engines tell log-probs at temperature 1 alone."""
        further = {name: one.engine for name, one in self.further.items()}
        engines = {DEFAULT_POLICY: self.engine, **further}
        return {name for name, engine in engines.items() if tells_unscaled_logprobs(engine)}

    @property
    def agents(self) -> dict[str, str]:
        """Return the names of further policies by the agents that they are."""
        return {agent: name for name, one in self.further.items() for agent in one.agents}


async def run_actors(
    bus: Bus, settings: ActorSettings, environment: Environment, stop: asyncio.Event
) -> None:
    """Roll out in `environment`, which others close, until `stop` or until the learner says it is done."""
    await follow_pace(bus)
    warn_of_cut_off_sampling(settings.sampling)
    engine = settings.engine  # here, so that one that does not tell what it keeps is refused first
    refuse_inexact(settings.actors.engine, exact=settings.exact)
    if isinstance(environment, ClientsEnvironment):
        environment.token = settings.gateway_token
    keep = load_filter(settings.actors.group_filter, settings.actors.group_limits)
    manifest = await first_policy(bus, settings.actors.patience_s, stop)
    if manifest is None:
        return
    async with AsyncExitStack() as open_parts:
        directory = open_parts.enter_context(tempfile.TemporaryDirectory(prefix="sluice-model-"))
        blobs = await open_parts.enter_async_context(blob_source(bus, settings.actors.weights))
        model = await obtain_model(
            bus, manifest, Path(directory), patience_s=settings.actors.patience_s, stop=stop
        )
        if model is None:
            return
        claimed = EngineClaims.open(bus, actor_name(), settings.actors.engine)
        claims = await open_parts.enter_async_context(claimed)
        for url in settings.actors.evaluation.urls:
            await claims.claim(url.rstrip("/"))
        own = OwnEngine(_own_builder(settings, model), blobs)
        open_parts.push_async_callback(own.close)
        await refuse_unfit_servers(
            settings.actors, model, blobs, manifest, max_new_tokens=settings.sampling.max_new_tokens
        )
        opponents = Opponents.from_config(settings.actors, model, settings.logs, blobs, actor=actor_name())
        open_parts.push_async_callback(opponents.close)
        shared = await shared_servers(
            engine, manifest.adapted, settings.further, stop,
            max_staleness=settings.max_staleness, patience_s=settings.actors.patience_s,
        )  # fmt: skip
        if shared is None:
            return
        policy = _fleet(settings, model, shared)
        if settings.colocation.enabled:
            sharing = DeviceSharing(bus, policy, settings.colocation, actor=actor_name())
            await open_parts.enter_async_context(sharing.active())
        open_parts.push_async_callback(policy.close)
        further = await _further_policies(settings, model, claims, open_parts, shared, stop)
        if further is None:
            return
        engines = _Engines(policy, opponents, claims, own, further, shared)
        if not await started(bus, engines.at_start(settings.actors), stop):
            return
        open_parts.enter_context(few_collections())
        open_parts.enter_context(quick_turns())
        if settings.actors.evaluation.only:
            await _evaluating_actor(bus, settings, engines, model, environment).run(stop)
            return
        actor = _actor(bus, settings, engines, blobs, model, environment, keep)
        await actor.run(stop, groups_at_once=settings.actors.groups_at_once)


class _Engines(NamedTuple):
    """The engines of an actor process, and its claims to servers that it shares with other actors."""

    policy: Fleet
    """Engines that roll out; they are not started where the actor only evaluates."""
    opponents: Opponents
    claims: EngineClaims
    own: OwnEngine
    """Engines of evaluations; where they are no servers, the first evaluation starts them."""
    further: Mapping[str, FurtherPolicy]
    """Policies that the run trains beside its own, by name."""
    shared: SharedServers
    """What serves further policies at the servers of the run's own, and adapters that they add themselves."""

    def at_start(self, actors: ActorsConfig) -> Sequence[Startable]:
        """Return what is started before the actor takes any work."""
        if actors.evaluation.only:
            return [self.own, self.opponents]
        beside = [self.own] if actors.evaluation.has_own_servers else []
        return [self.policy, self.opponents, *beside, *self.further.values()]


async def _further_policies(
    settings: ActorSettings, model: Path, claims: EngineClaims, opened: AsyncExitStack,
    shared: SharedServers, stop: asyncio.Event,
) -> dict[str, FurtherPolicy] | None:  # fmt: skip
    """Return the further policies with engines that have not started; None on `stop`."""
    opener = PolicyOpener(
        settings.actors, settings.further, opened, model, claims,
        shards=settings.shards, logs=settings.logs, shared=shared,
    )  # fmt: skip
    found: dict[str, FurtherPolicy] = {}
    for name in settings.further:
        policy = await opener.open(name, stop)
        if policy is None:
            return None
        found[name] = policy
    return found


def _actor(
    bus: Bus, settings: ActorSettings, engines: _Engines, blobs: BlobSource, model: Path,
    environment: Environment, keep: GroupFilter,
) -> "_Actor":  # fmt: skip
    """Put the parts of an actor together around engines that have started."""
    engine, opponents = engines.policy, engines.opponents.engines
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    images = ImageChat.of(model, tokenizer)
    sampled = Sampling.from_config(settings.sampling, stop_tokens(model, tokenizer))
    from_learner = getattr(settings.actors.engine, "update", "") == "group"
    probe = ProbeCheck(engine, bound_nats=settings.actors.probe_bound_nats, exact=settings.exact)
    follower = PolicyFollower(
        bus, engine, blobs, loads_at_once=2, from_learner=from_learner, served=engines.shared.own,
        on_loaded=probe.loaded,
    )  # fmt: skip
    policy = Policy(
        engine, tokenizer, sampled,
        mask_older_versions=settings.actors.mask_older_versions,
        routed_experts=settings.actors.engine.routed_experts,
        tool_calls=settings.actors.tool_calls,
        opponents=opponents,
        images=images,
    )  # fmt: skip
    further = FurtherEngines({name: one.engine for name, one in engines.further.items()}, settings.agents)
    policy.further = further
    policy.unscaled = settings.unscaled
    worker = Worker(
        bus, policy, environment, follower=follower, keep=keep, shards=settings.shards, name=actor_name(),
        share_after_s=settings.actors.share_after_s,
    )  # fmt: skip
    worker.retries = settings.actors.retries
    worker.interruption.config = settings.actors.interruption
    worker.further = {name: one.leases for name, one in engines.further.items()}
    worker.room.admission = LeaseAdmission(
        policy.contexts, lambda: engine.kv_tokens, soft_share=settings.actors.fleet.soft_kv_share
    )
    answering: EvaluationEngines = engines.own
    if settings.actors.evaluates_on == "rollout":
        at_once = settings.actors.evaluation.prompts_at_once
        answering = RolloutEngines(bus, engine, follower, prompts_at_once=at_once)
    evaluator = None  # also on demand, where no client waits for held-out prompts
    if settings.actors.evaluates_on != "none" and not isinstance(environment, RunsOnDemand):
        evaluator = _evaluator(bus, settings, engines, answering, model, environment)
        evaluator.further = further
        evaluator.images = images
    admin = EngineAdmin(
        bus, engine, settings.engine, model, engines.claims, actor=actor_name(),
        colocated=settings.colocation.enabled, shared=engines.shared, exact=settings.exact,
    )  # fmt: skip
    return _Actor(bus, engines, follower, probe, worker, environment, evaluator, admin)


def _evaluator(
    bus: Bus, settings: ActorSettings, engines: _Engines, answering: EvaluationEngines, model: Path,
    environment: Environment,
) -> Evaluator:  # fmt: skip
    """Return what answers held-out prompts on `answering`."""
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    sampled = Sampling.from_config(settings.sampling, stop_tokens(model, tokenizer))
    evaluator = Evaluator(
        bus, answering, tokenizer, environment, sampled=sampled,
        greedy=replace(sampled, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0),
        tool_calls=settings.actors.tool_calls,
        opponents=engines.opponents.engines,
    )  # fmt: skip
    evaluator.finish_within_s = settings.actors.interruption.finish_within_s
    endpoints = settings.actors.evaluation.endpoints
    evaluator.endpoints = chat_endpoints(endpoints, tokenizer, settings.actors.tool_calls)
    return evaluator


def _evaluating_actor(
    bus: Bus, settings: ActorSettings, engines: _Engines, model: Path, environment: Environment
) -> EvaluatingActor:
    """Put the parts of an actor together that rolls nothing out."""
    evaluator = _evaluator(bus, settings, engines, engines.own, model, environment)
    return EvaluatingActor(bus, actor_name(), evaluator, engines.opponents, engines.claims)


class _Actor:
    """The parts of an actor process, run together, and what they show."""

    def __init__(
        self, bus: Bus, engines: _Engines, follower: PolicyFollower, probe: ProbeCheck, worker: Worker,
        environment: Environment, evaluator: Evaluator | None, admin: EngineAdmin,
    ) -> None:  # fmt: skip
        self._bus = bus
        self._engine, self._opponents, self._claims, _, self._further, _ = engines
        self._follower = follower
        self._probe = probe
        self._worker = worker
        self._environment = environment
        self._evaluator = evaluator
        self._admin = admin
        self._report = EngineReport(self._engine, follower)

    async def run(self, stop: asyncio.Event, *, groups_at_once: int) -> None:
        finished = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follower.run(finished))
            tasks.create_task(self._probe.run(finished))
            tasks.create_task(self._opponents.run(lambda: self._follower.latest, finished))
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
            tasks.create_task(stop_when_done(lambda: self._follower.stage, self._failure, stop))
            for further in self._further.values():
                tasks.create_task(further.run(finished))
            try:
                async with asyncio.TaskGroup() as work:
                    work.create_task(self._worker.run(stop, groups_at_once=groups_at_once))
                    for further in self._further.values():
                        work.create_task(further.leases.run(stop, groups_at_once=groups_at_once))
                    if self._evaluator is not None:
                        work.create_task(self._evaluator.run(stop))
            finally:
                finished.set()

    def _failure(self) -> str:
        further = [one.failure for one in self._further.values()]
        return next(filter(None, (self._engine.failure, self._opponents.failure, *further)), "")

    def _waits_for(self) -> str:
        if self._follower.stage == "done":
            return ""
        return "" if self._engine.policy_version >= 0 else "weights of its engines"

    def _counters(self) -> tuple[int, dict[str, Json]]:
        return self._report.step, {
            **self._worker.episode_metrics.metrics,
            **self._report.counters(),
            **self._worker.ends.metrics,
            **self._worker.failures.metrics,
            **(self._worker.room.admission.metrics if self._worker.room.admission else {}),
            **self._worker.sampled.metrics,
            **({"engine/probe_nats": max(self._probe.nats.values())} if self._probe.nats else {}),
        }

    def _look(self) -> tuple[str, dict[str, Json]]:
        engine = self._engine
        doing = "generating" if engine.running else idle_text(self._environment)
        if engine.released:
            doing = "waiting while the learner has the device"
        if not engine.running and self._follower.stage == "warmup":
            doing = "waiting for the warm-up to end"
        alarms = [self._worker.failures.alarm, *(further.alarm for further in self._further.values())]
        progress: dict[str, Json] = {name: further.progress for name, further in self._further.items()}
        if self._evaluator is not None and self._evaluator.doing:
            doing = f"{doing}, {self._evaluator.doing}"
        return doing, {
            **self._report.state(),
            "opponents": dict(self._opponents.versions),
            **({"policies": progress} if progress else {}),
            "alarm": "; ".join(filter(None, [self._follower.refusal, *self._probe.alarms.values(), *alarms])),
            **self._worker.counts,
            **self._worker.ends.status,
            **environment_report(self._environment),
        }


def _own_builder(settings: ActorSettings, model: Path) -> Callable[[], Engine]:
    """Return what builds the engines of evaluations that are not of the rollouts' engines."""
    if settings.actors.evaluation.only:
        return partial(_fleet, settings, model, SharedServers(None, {}))
    return beside_rollouts(settings.actors, model, settings.logs, actor=actor_name())


def _fleet(settings: ActorSettings, model: Path, shared: SharedServers) -> Fleet:
    """Return the engines of this process, not started."""
    refuse_unfit_model(settings.engine, model)
    engine = able_to_release(settings.engine) if settings.colocation.enabled else settings.engine
    first_gpus = {f"engine-{number}": gpu for number, gpu in enumerate(gpu_plan(settings.actors).rollouts)}
    builds = attached_builds(engine, model, shared.own) or engine_builds(
        engine, model, first_gpus, settings.logs, actor=actor_name(), served=shared.own, exact=settings.exact
    )
    return Fleet(shared.hosts(builds), settings.actors.fleet)


def stop_tokens(model: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return every token that ends an answer, by the model's config and by the tokenizer."""
    text = AutoConfig.from_pretrained(model, trust_remote_code=False).get_text_config()
    configured = getattr(text, "eos_token_id", None)
    configured = configured if isinstance(configured, list) else [configured]
    found = {token for token in [*configured, tokenizer.eos_token_id] if token is not None}
    if not found:
        raise ConfigError("neither the model's config.json nor its tokenizer names an end token (eos_token)")
    return tuple(sorted(found))
