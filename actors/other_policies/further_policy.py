"""A policy that an actor serves beside the run's own: engines, weights and leases, all of its own."""

import asyncio
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from actors.engines.fleet.build import engine_builds, refuse_unfit_model
from actors.engines.fleet.engine_admin import EngineAdmin, attached_builds
from actors.engines.fleet.engine_claims import EngineClaims
from actors.engines.fleet.fleet import Fleet
from actors.engines.fleet.gpu_plan import gpu_plan
from actors.engines.fleet.member import Build
from actors.engines.fleet.shared_servers import SharedServers
from actors.engines.served_adapters import ServedAdapters, served_adapters
from actors.engines.sglang.server.kernel_versions import learners_kernels
from actors.metrics.counters import report_actor, report_end, report_metrics
from actors.metrics.engine_report import EngineReport
from actors.other_policies.opponents import refuse_other_tokenizer
from actors.rollouts.account import ActorAccount
from actors.rollouts.further_leases import FurtherLeases
from actors.rollouts.leases import PolicyLeases
from actors.settings.actors import ActorsConfig
from actors.settings.engines import EngineConfig
from actors.weights.first_policy import actor_name, first_policy
from actors.weights.follow import PolicyFollower, obtain_model
from actors.weights.probe import ProbeCheck
from bus.codec import Json
from bus.connection import Bus
from bus.connection.reporting_rate import follow_pace
from bus.connection.status import Activity
from bus.errors import ConfigError
from bus.messages import AdaptedBase
from bus.policy_names import DEFAULT_POLICY
from storage.weights.blob_sources import Blobs


@dataclass(frozen=True)
class FurtherSettings:
    """What an actor needs to know of one further policy."""

    bus: Bus
    engine: EngineConfig
    agents: tuple[str, ...]
    """Agents that it is where a call names no policy."""
    max_staleness: int
    """Versions that a trajectory may lag its learner."""
    exact: bool = False
    """Whether the engines give the learner's log-probs to the bit (model.numerics)."""
    shares_servers: bool = False
    """Whether the servers of the run's own policy serve it too, beside the same frozen weights."""
    account: Path | None = None
    """Directory for the account of what is published for it; None keeps none."""


class FurtherPolicy:
    """Follows one policy with engines of its own, and takes its leases. All that concerns it is said on the
    bus of the run that trains it, as an actor of that run would."""

    def __init__(self, name: str, bus: Bus, parts: "_Parts", leases: FurtherLeases) -> None:
        self.engine = parts.engine
        self.leases = leases
        self._name = name
        self._bus = bus
        self._parts = parts
        self._report = EngineReport(parts.engine, parts.follower)

    @property
    def failure(self) -> str:
        """Return why the engines have stopped for good; empty as long as they have not."""
        return f"policy {self._name}: {self.engine.failure}" if self.engine.failure else ""

    @property
    def alarm(self) -> str:
        refusal = self._parts.follower.refusal
        refused = f"policy {self._name}: {refusal}" if refusal else ""
        return "; ".join(filter(None, [refused, *self._parts.probe.alarms.values()]))

    @property
    def progress(self) -> dict[str, Json]:
        """Return how far the learner is, and the version that its engines have; -1 before the first."""
        latest = self._parts.follower.latest
        if latest is None:
            return {"stage": "starting", "step": 0, "published": -1, "oldest_in_use": -1}
        trained = latest.policy_version - latest.trains_from if latest.stage in ("rl", "done") else 0
        return {
            "stage": latest.stage,
            "step": trained,
            "published": latest.policy_version,
            "oldest_in_use": self.engine.policy_version,
        }

    async def start(self) -> None:
        """Start the engines. Raises `EngineError`, or `ConfigError` where that is for the settings."""
        await self.engine.start()

    async def run(self, finished: asyncio.Event) -> None:
        source = actor_name()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._parts.follower.run(finished))
            tasks.create_task(self._parts.probe.run(finished))
            tasks.create_task(self._parts.admin.run(finished))
            tasks.create_task(report_actor(self._bus, self._look, finished))
            tasks.create_task(report_metrics(self._bus, source=source, look=self._counters, stop=finished))

    async def report_end(self, reason: str) -> None:
        """Say to the run that trains the policy why this process ends."""
        await report_end(self._bus, source=actor_name(), look=self._counters, reason=reason)

    def _look(self) -> Activity:
        values = {**self._report.state(), "alarm": self.alarm, **self.leases.counts}
        if self.engine.running:
            return Activity("generating", values)
        return Activity("waiting for leases", values, wait="leases")

    def _counters(self) -> tuple[int, dict[str, Json]]:
        return self._report.step, self._report.counters()


class _Parts(NamedTuple):
    engine: Fleet
    follower: PolicyFollower
    probe: ProbeCheck
    admin: EngineAdmin


class PolicyOpener:
    """Gets the models of further policies and builds their engines, not started, for one actor."""

    def __init__(
        self, actors: ActorsConfig, policies: Mapping[str, FurtherSettings], opened: AsyncExitStack,
        run_model: Path, claims: EngineClaims, *, shards: int, logs: Path,
        shared: SharedServers | None = None,
    ) -> None:  # fmt: skip
        """Build engines that live as long as `opened`, which the caller closes. `run_model` is the directory
        of the model of the run's own policy, whose tokenizer each must have; `claims` are the actor's, for
        all of its policies; `shared` has those at the run's own servers."""
        self._actors = actors
        self._policies = policies
        self._opened = opened
        self._run_model = run_model
        self._claims = claims
        self._shards = shards
        self._logs = logs
        self._shared = shared or SharedServers(None, {})
        own = {name: one.engine for name, one in policies.items() if name not in self._shared.further}
        self._gpus = gpu_plan(actors, own).policies

    async def open(self, name: str, stop: asyncio.Event) -> FurtherPolicy | None:
        """Return the policy, or None on `stop`. Raises `BusAwayError` for a policy that nobody publishes, and
        `ConfigError` for another tokenizer, other kernels than its learner's, or a model that its engines do
        not serve."""
        bus, engine, opened = self._policies[name].bus, self._policies[name].engine, self._opened
        await follow_pace(bus)
        patience_s, learner = self._actors.patience_s, f"launch learner --policy {name}"
        manifest = await first_policy(bus, patience_s, stop, learner=learner)
        if manifest is None:
            return None
        kernels = await learners_kernels(engine, manifest.kernels)
        directory = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="sluice-model-")))
        blobs = Blobs(bus)  # alone: no further policy publishes over HTTP
        model = await obtain_model(bus, manifest, directory, patience_s=patience_s, stop=stop)
        if model is None:
            return None
        refuse_other_tokenizer(f"policies.{name}.model", model, self._run_model)
        refuse_unfit_model(engine, model)
        served, builds = await self._engines(name, model, manifest.adapted)
        fleet = Fleet(builds, self._actors.fleet)
        opened.push_async_callback(fleet.close)
        exact = self._policies[name].exact
        bound_nats = self._actors.probe_bound_nats
        probe = ProbeCheck(fleet, bound_nats=bound_nats, exact=exact, kernels=kernels)
        from_learner = engine.servers.update == "group"
        follower = PolicyFollower(
            bus, fleet, blobs, loads_at_once=2, from_learner=from_learner, served=served,
            on_loaded=probe.loaded,
        )  # fmt: skip
        admin = EngineAdmin(
            bus, fleet, engine, model, self._claims, actor=actor_name(), colocated=False,
            shared=SharedServers(served, {}), exact=exact,
        )  # fmt: skip
        if name in self._shared.further:
            self._shared.admit(name, fleet)
            admin.refusal = f"policy {name!r} is at the servers of the run's own: change those of that run"
        account = ActorAccount(self._policies[name].account, actor_name())
        asked = PolicyLeases(
            bus, follower, shards=self._shards, actor=actor_name(), counts=Counter(), account=account
        )
        opened.callback(asked.account.close)
        leases = FurtherLeases(name, bus, asked, follower)
        return FurtherPolicy(name, bus, _Parts(fleet, follower, probe, admin), leases)

    async def _engines(
        self, name: str, model: Path, adapted: AdaptedBase | None
    ) -> tuple[ServedAdapters | None, Mapping[str, Build]]:
        one = self._policies[name]
        if shared := self._shared.further.get(name):
            return shared, self._shared.guests(name)
        await self._claims.claim_attached(one.engine)
        served = served_adapters(one.engine, adapted, max_staleness=one.max_staleness)
        attached = attached_builds(one.engine, model, served)
        return served, attached or self._builds(name, one.engine, model, served)

    def _builds(
        self, name: str, config: EngineConfig, model: Path, served: ServedAdapters | None
    ) -> Mapping[str, Build]:
        gpus = {f"{name}-{number}": gpu for number, gpu in enumerate(self._gpus[name])}
        return engine_builds(
            config, model, gpus, self._logs,
            actor=actor_name(), served=served, exact=self._policies[name].exact,
        )  # fmt: skip


async def shared_servers(
    engine: EngineConfig, adapted: AdaptedBase | None, policies: Mapping[str, FurtherSettings],
    stop: asyncio.Event, *, max_staleness: int, patience_s: float,
) -> SharedServers | None:  # fmt: skip
    """Return what serves the further policies that share the servers of the run's own; None on `stop`. Raises
    `ConfigError` for a policy whose frozen weights are others, and as `served_adapters` does."""
    own = served_adapters(engine, adapted, max_staleness=max_staleness)
    found: dict[str, ServedAdapters] = {}
    if own is None or adapted is None:
        return SharedServers(None, {})
    for name, one in policies.items():
        if not one.shares_servers:
            continue
        manifest = await first_policy(one.bus, patience_s, stop, learner=f"launch learner --policy {name}")
        if manifest is None:
            return None
        _refuse_other_base(name, adapted, manifest.adapted)
        served = served_adapters(engine, manifest.adapted, max_staleness=one.max_staleness)
        assert served is not None, "its engines have the settings of the run's own"
        found[name] = served
    if not found:
        return SharedServers(own, {})
    all_of_them, base = {DEFAULT_POLICY: own, **found}, adapted.identity
    beside = {
        name: one.sharing((other for other in all_of_them.values() if other is not one), base)
        for name, one in all_of_them.items()
    }
    return SharedServers(beside.pop(DEFAULT_POLICY), beside)


def _refuse_other_base(name: str, own: AdaptedBase, announced: AdaptedBase | None) -> None:
    """Refuse a policy whose frozen weights are others; one without adapters is refused for that."""
    if announced is not None and announced.identity != own.identity:
        raise ConfigError(
            f"policies.{name}: its frozen weights are others than those of the run's own policy, and a "
            "server has one of the two: give both the same model, seed and learner.publish_dtype, or set "
            f"policies.{name}.shares_servers=false, for servers of its own"
        )
