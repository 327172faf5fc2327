"""`launch actors`: the engines, the rollout workers and the evaluator of one host, in one process."""

import asyncio
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import structlog
from transformers import AutoTokenizer

from actors.actor import Actor, ActorEngines
from actors.engine_start import started
from actors.engines.base import Engine, Sampling
from actors.engines.fleet.build import engine_builds, refuse_unfit_model
from actors.engines.fleet.colocation import DeviceSharing, able_to_release
from actors.engines.fleet.engine_admin import EngineAdmin, attached_builds
from actors.engines.fleet.engine_claims import EngineClaims
from actors.engines.fleet.engine_nodes import LeadingNode
from actors.engines.fleet.fleet import Fleet
from actors.engines.fleet.gpu_plan import gpu_plan
from actors.engines.fleet.shared_servers import SharedServers
from actors.engines.on_policy import tells_unscaled_logprobs
from actors.engines.sglang.server.kernel_versions import learners_kernels
from actors.environments.base import Environment, RunsOnDemand
from actors.environments.failures import EnvironmentFailures
from actors.environments.sample_calls import FirstCalls
from actors.evaluating_actor import EvaluatingActor
from actors.evaluation.dedicated import beside_rollouts, exact_engine, refuse_unfit_servers
from actors.evaluation.engines import EvaluationEngines, OwnEngine, RolloutEngines
from actors.evaluation.evaluator import Evaluator, EvaluatorParts
from actors.evaluation.text_completions import chat_endpoints
from actors.other_policies.further_policy import FurtherPolicy, FurtherSettings, PolicyOpener, shared_servers
from actors.other_policies.opponents import Opponents
from actors.policy.cut_off_sampling import told_by, warn_of_cut_off_sampling
from actors.policy.other_engines import OtherEngines
from actors.policy.policy import Policy
from actors.policy.version_masking import Masking
from actors.rewards.group_filters import GroupFilter, load_filter
from actors.rollouts.lease_admission import LeaseAdmission
from actors.rollouts.worker import Worker, WorkerParts
from actors.settings.actors import ActorsConfig, SamplingConfig
from actors.settings.engines import EngineConfig, refuse_inexact
from actors.weights.first_policy import actor_name, first_policy
from actors.weights.follow import PolicyFollower, obtain_model
from actors.weights.probe import ProbeCheck
from bus.config import ColocationConfig
from bus.connection import Bus
from bus.connection.reporting_rate import follow_pace
from bus.policy_names import DEFAULT_POLICY
from bus.process.process_tuning import few_collections, quick_turns
from storage.chats.stop_tokens import stop_token_ids, stop_tokens
from storage.images.chat import ImageChat
from storage.weights.blob_sources import BlobSource, blob_source

log = structlog.get_logger()


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
    account: Path | None = None
    """Directory for the account of what is published (storage/account/records.py); None keeps none."""
    colocation: ColocationConfig = field(default_factory=ColocationConfig)
    """Whether the engines share the devices of this host with the learner."""
    further: Mapping[str, FurtherSettings] = field(default_factory=dict)
    """Policies that the run trains beside its own, by name."""
    exact: bool = False
    """Whether engines that roll out give the learner's log-probs to the bit (model.numerics)."""
    calls_rewards: bool = False
    """Whether to call rewards before their first rollouts: the start of the run did not."""
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
        return {agent: name for name, one in self.further.items() for agent in one.agents}


async def run_actors(
    bus: Bus, settings: ActorSettings, environment: Environment, stop: asyncio.Event
) -> None:
    """Roll out in `environment`, which others close, until `stop` or until the learner says it is done."""
    await follow_pace(bus)
    warn_of_cut_off_sampling(settings.sampling)
    engine = settings.engine  # here, to refuse an engine that does not tell what it keeps first
    refuse_inexact(settings.actors.engine, exact=settings.exact)
    keep = load_filter(settings.actors.group_filter, settings.actors.group_limits)
    manifest = await first_policy(bus, settings.actors.patience_s, stop)
    if manifest is None:
        return
    kernels = await learners_kernels(engine, manifest.kernels)
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
        leading = await _leading(bus, engine, policy, open_parts)
        open_parts.push_async_callback(policy.close)
        further = await _further_policies(settings, model, claims, open_parts, shared, stop)
        if further is None:
            return
        engines = ActorEngines(policy, opponents, claims, own, further, shared)
        buses = [bus, *(one.bus for one in settings.further.values())]
        if not await started(buses, [*leading, *engines.at_start(settings.actors)], stop):
            return
        open_parts.enter_context(few_collections())
        open_parts.enter_context(quick_turns())
        if settings.actors.evaluation.only:
            await _evaluating_actor(bus, settings, engines, model, environment).run(stop)
            return
        actor = _actor(bus, settings, engines, blobs, model, environment, keep, kernels)
        await actor.run(stop, groups_at_once=settings.actors.groups_at_once)


async def _leading(
    bus: Bus, engine: EngineConfig, policy: Fleet, opened: AsyncExitStack
) -> list[LeadingNode]:
    """Return what leads the nodes of the engine as long as `opened`; nothing for an engine of one node."""
    if engine.servers.nodes == 1:
        return []
    leader = LeadingNode(bus, engine.servers)
    await opened.enter_async_context(leader.leading())
    await opened.enter_async_context(leader.watched(policy.fail))
    return [leader]


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
    bus: Bus, settings: ActorSettings, engines: ActorEngines, blobs: BlobSource, model: Path,
    environment: Environment, keep: GroupFilter, kernels: Mapping[str, str],
) -> Actor:  # fmt: skip
    """Put the parts of an actor together around engines that have started."""
    engine = engines.policy
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    images = ImageChat.of(model, tokenizer)
    stops = stop_tokens(model, tokenizer)
    log.info("answers_end_with", tokens=list(map(str, stops)))
    sampled = Sampling.from_config(settings.sampling, [stop.number for stop in stops])
    from_learner = settings.actors.engine.servers.update == "group"
    probe = ProbeCheck(
        engine, bound_nats=settings.actors.probe_bound_nats, exact=settings.exact, kernels=kernels
    )
    follower = PolicyFollower(
        bus, engine, blobs, loads_at_once=2, from_learner=from_learner, served=engines.shared.own,
        on_loaded=probe.loaded,
    )  # fmt: skip
    others = OtherEngines(
        opponents=engines.opponents.engines,
        further={name: one.engine for name, one in engines.further.items()},
        agents=settings.agents,
        unscaled=settings.unscaled,
    )
    policy = Policy(
        engine, tokenizer, sampled,
        masking=Masking(settings.actors.mask_older_versions, settings.actors.mask_older_kv),
        routed_experts=settings.actors.engine.routed_experts,
        tool_calls=settings.actors.tool_calls,
        images=images,
        others=others,
    )  # fmt: skip
    if settings.actors.offers_native_tools:
        policy.refuse_unread_calls()
    parts = _worker_parts(settings, engines, policy, environment)
    worker = Worker(
        bus, policy, environment, parts,
        follower=follower, keep=keep, shards=settings.shards, name=actor_name(),
    )  # fmt: skip
    answering: EvaluationEngines = engines.own
    if settings.actors.evaluates_on == "rollout":
        at_once = settings.actors.evaluation.prompts_at_once
        answering = RolloutEngines(bus, engine, follower, prompts_at_once=at_once)
    evaluator = None  # also on demand, where no client waits for held-out prompts
    if settings.actors.evaluates_on != "none" and not isinstance(environment, RunsOnDemand):
        evaluator = _evaluator(bus, settings, others, answering, model, environment, images)
    joining = told_by(settings.engine.servers, settings.sampling)
    admin = EngineAdmin(
        bus, engine, joining, model, engines.claims, actor=actor_name(),
        colocated=settings.colocation.enabled, shared=engines.shared, exact=settings.exact,
    )  # fmt: skip
    return Actor(bus, engines, follower, probe, worker, environment, evaluator, admin)


def _worker_parts(
    settings: ActorSettings, engines: ActorEngines, policy: Policy, environment: Environment
) -> WorkerParts:
    engine, actors = engines.policy, settings.actors
    return WorkerParts(
        account=settings.account,
        retries=actors.retries,
        first_calls=FirstCalls(actors) if settings.calls_rewards else None,
        failures=EnvironmentFailures(environment, actors.failures, serves=lambda: engine.serves),
        interruption=actors.interruption,
        share_after_s=actors.share_after_s,
        further={name: one.leases for name, one in engines.further.items()},
        admission=LeaseAdmission(
            policy.contexts, lambda: engine.kv_tokens, soft_share=actors.fleet.soft_kv_share
        ),
    )


def _evaluator(
    bus: Bus, settings: ActorSettings, others: OtherEngines, answering: EvaluationEngines, model: Path,
    environment: Environment, images: ImageChat | None,
) -> Evaluator:  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    sampled = Sampling.from_config(settings.sampling, stop_token_ids(model, tokenizer))
    tool_calls = settings.actors.tool_calls
    parts = EvaluatorParts(
        sampled=sampled,
        greedy=replace(sampled, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0),
        tool_calls=tool_calls,
        others=others,
        images=images,
        endpoints=chat_endpoints(settings.actors.evaluation.endpoints, tokenizer, tool_calls),
        finish_within_s=settings.actors.interruption.finish_within_s,
        limits=settings.actors.failures,
    )
    return Evaluator(bus, answering, tokenizer, environment, parts)


def _evaluating_actor(
    bus: Bus, settings: ActorSettings, engines: ActorEngines, model: Path, environment: Environment
) -> EvaluatingActor:
    """Put the parts of an actor together that rolls nothing out."""
    others = OtherEngines(opponents=engines.opponents.engines)
    evaluator = _evaluator(bus, settings, others, engines.own, model, environment, None)
    return EvaluatingActor(bus, actor_name(), evaluator, engines.opponents, engines.claims)


def _own_builder(settings: ActorSettings, model: Path) -> Callable[[], Engine]:
    if settings.actors.evaluation.only:
        return partial(_fleet, settings, model, SharedServers(None, {}))
    return beside_rollouts(settings.actors, model, settings.logs, actor=actor_name())


def _fleet(settings: ActorSettings, model: Path, shared: SharedServers) -> Fleet:
    refuse_unfit_model(settings.engine, model)
    engine = able_to_release(settings.engine) if settings.colocation.enabled else settings.engine
    first_gpus = {f"engine-{number}": gpu for number, gpu in enumerate(gpu_plan(settings.actors).rollouts)}
    builds = attached_builds(engine, model, shared.own) or engine_builds(
        engine, model, first_gpus, settings.logs, actor=actor_name(), served=shared.own, exact=settings.exact
    )
    fleet = settings.actors.fleet
    if engine.servers.nodes > 1:  # others may have its leases until all nodes are there again
        fleet = fleet.model_copy(update={"restarts": 0})
    return Fleet(shared.hosts(builds), fleet)
