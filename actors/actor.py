"""What an actor process runs beside each other until it ends, and what it shows of that."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from actors.engine_start import Startable
from actors.engines.fleet.engine_admin import EngineAdmin
from actors.engines.fleet.engine_claims import EngineClaims
from actors.engines.fleet.fleet import Fleet
from actors.engines.fleet.shared_servers import SharedServers
from actors.environments.base import CallsRewards, Environment, RunsOnDemand
from actors.evaluation.engines import OwnEngine
from actors.evaluation.evaluator import Evaluator
from actors.metrics.counters import report_actor, report_end, report_metrics
from actors.metrics.engine_report import EngineReport
from actors.other_policies.further_policy import FurtherPolicy
from actors.other_policies.opponents import Opponents
from actors.rewards.scoring.call_times import reward_report
from actors.rollouts.worker import Worker
from actors.run_end import stop_when_done
from actors.settings.actors import ActorsConfig
from actors.weights.first_policy import actor_name
from actors.weights.follow import PolicyFollower
from actors.weights.probe import ProbeCheck
from bus.codec import Json
from bus.connection import Bus
from bus.connection.status import Activity
from bus.errors import ConfigError, leaves
from bus.messages import Wait

DOING: Mapping[Wait, str] = {
    "": "generating",
    "device": "waiting while the learner has the device",
    "engine": "waiting for an engine that serves",
    "environments": "waiting for environments",
    "leases": "waiting for leases",
    "rewards": "waiting for rewards",
    "warmup": "waiting for the warm-up to end",
}


class ActorEngines(NamedTuple):
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
        if actors.evaluation.only:
            return [self.own, self.opponents]
        beside = [self.own] if actors.evaluation.has_own_servers else []
        return [self.policy, self.opponents, *beside, *self.further.values()]


class Actor:
    """The parts of an actor process, run together, and what they show."""

    def __init__(
        self, bus: Bus, engines: ActorEngines, follower: PolicyFollower, probe: ProbeCheck, worker: Worker,
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
        """Roll out, answer held-out prompts and follow the weights until `stop`."""
        finished = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follower.run(finished))
            tasks.create_task(self._probe.run(finished))
            tasks.create_task(self._opponents.run(lambda: self._follower.latest, finished))
            tasks.create_task(report_actor(self._bus, self._look, finished, waits_for=self._waits_for))
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
            except* ConfigError as group:
                reason = str(next(leaves(group)))
                await report_end(self._bus, source=actor_name(), look=self._counters, reason=reason)
                for further in self._further.values():
                    await further.report_end(reason)
                raise
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
        means = self._worker.episode_metrics.metrics
        return self._report.step, {
            **means,
            **self._report.counters(further_means=sorted(means)),
            **self._worker.ends.metrics,
            **self._worker.failures.metrics,
            **(self._worker.room.admission.metrics if self._worker.room.admission else {}),
            **self._worker.sampled.metrics,
            "engine/probe_alarms": len(self._probe.alarms),
            **({"engine/probe_nats": max(self._probe.nats.values())} if self._probe.nats else {}),
        }

    def _look(self) -> Activity:
        wait = self._wait()
        doing = DOING[wait]
        alarms = [self._worker.failures.alarm, *(further.alarm for further in self._further.values())]
        progress: dict[str, Json] = {name: further.progress for name, further in self._further.items()}
        if self._evaluator is not None:
            alarms.append(self._evaluator.alarm)
        if self._evaluator is not None and self._evaluator.doing:
            doing = f"{doing}, {self._evaluator.doing}"
        values: dict[str, Json] = {
            **self._report.state(),
            "opponents": dict(self._opponents.versions),
            **({"policies": progress} if progress else {}),
            "alarm": "; ".join(filter(None, [self._follower.refusal, *self._probe.alarms.values(), *alarms])),
            **self._worker.status,
            **environment_report(self._environment),
        }
        return Activity(doing, values, wait=wait)

    def _wait(self) -> Wait:
        engine = self._engine
        if not engine.running and self._follower.stage == "warmup":
            return "warmup"
        if engine.released:
            return "device"
        if not engine.serves:
            return "engine"
        if engine.running or engine.waiting:
            return ""
        return idle_wait(self._environment, self._worker.rollouts_running)


def environment_report(environment: Environment) -> dict[str, Json]:
    """Return numbers for screens; nothing of rewards where an environment computes them by itself."""
    return {
        **(environment.status if isinstance(environment, RunsOnDemand) else {}),
        **(reward_report(environment.reward_times) if isinstance(environment, CallsRewards) else {}),
    }


def idle_wait(environment: Environment, rollouts: int) -> Wait:
    """Return what an actor with so many rollouts under way waits for whose engines have no request."""
    times = environment.reward_times if isinstance(environment, CallsRewards) else ()
    if any(one.running for one in times):
        return "rewards"
    return "environments" if rollouts else "leases"
