"""Rollouts that an actor does not end: the next one goes on from their turns, token by token."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from structlog.testing import capture_logs

from actors.episodes.episode import Episode
from actors.rollouts import leases
from actors.rollouts.worker import Worker
from actors.settings.groups import InterruptionConfig
from benchmarks.scripted_engine import ScriptedEngine
from bus.codec import encode
from bus.connection import Bus
from bus.errors import EngineLostError
from bus.streams.publish import Publisher
from bus.trajectory import Trajectory
from storage.settings.admission import AdmissionConfig
from storage.shard.server import Shard
from tests.actors import workers
from tests.actors.workers import TOKENIZER, killed_at_the_end
from tests.factories import make_lease
from tests.storage.serving import (
    LearnerStandIn,
    Storage,
    expect_redelivery_after,
    messages,
    opened,
    running,
    serving,
    until,
)

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]
ANSWER = [*TOKENIZER("12345", add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]
ONE_GROUP = AdmissionConfig(groups_per_step=1, samples_per_prompt=2, max_staleness=0)
BOTH = "g00000000.0", "g00000000.1"
AT_ONCE = InterruptionConfig(finish_within_s=0, keep_turns_every_s=None)


def answer(token_ids) -> list[int]:
    """What is left of the one answer there is, after as much of it as the tokens end with."""
    begun = next(
        n for n in range(len(ANSWER) - 1, -1, -1) if list(token_ids[len(token_ids) - n :]) == ANSWER[:n]
    )
    return ANSWER[begun:]


class TwoTurns:
    """An environment of two chat turns. It counts the runs of each rollout, and can hold them in between, or
    before the first."""

    def __init__(
        self, *held: str, per_episode: int | None = 1, second: str = "1+1=", late: Collection[str] = ()
    ) -> None:
        self.trajectories_per_episode = per_episode
        self.not_begun: list[str] = []
        self.in_between: list[str] = []
        self.ended: list[str] = []
        self.gate = asyncio.Event()
        """Holds the rollouts named `held` after their first turns."""
        self.entrance = asyncio.Event()
        """Holds the rollouts named `late` before their first turns."""
        self._held = held
        self._late = late
        self._second = second

    async def run(self, task, policy):
        policy = policy.fresh(task.task_id)
        chat = list(task.messages)
        if task.task_id in self._late:
            self.not_begun.append(task.task_id)
            await self.entrance.wait()
        chat.append((await policy.chat(chat)).message)
        self.in_between.append(task.task_id)
        if task.task_id in self._held:
            await self.gate.wait()
        await policy.chat([*chat, {"role": "user", "content": self._second}])
        self.ended.append(task.task_id)
        return Episode(policy.trajectories(1.0))


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine(answer)
    await engine.start()
    yield engine
    await engine.close()


def make_worker(
    bus: Bus, engine: ScriptedEngine, environment, config: InterruptionConfig, *, share_after_s: float = 0.0
) -> Worker:
    parts = {"share_after_s": share_after_s, "interruption": config}
    return workers.make_worker(bus, engine, environment, max_new_tokens=16, **parts)


@asynccontextmanager
async def stopped_at_the_end(worker: Worker):
    """At work until its process is told to stop, which it does within seconds."""
    stop = asyncio.Event()
    task = asyncio.create_task(worker.run(stop, groups_at_once=4))
    try:
        yield
    finally:
        stop.set()
        async with asyncio.timeout(60):
            await task


async def held_in_second_turns(engine: ScriptedEngine, environment: TwoTurns) -> None:
    """Return when both rollouts have had a turn, and the engine is in the midst of their next ones."""
    await until(lambda: len(environment.in_between) == 2)
    engine.hold()
    environment.gate.set()
    await until(lambda: engine.running == 2)


async def trained(bus: Bus, storage: Storage) -> list[Trajectory]:
    """The trajectories of the group that the first step is given."""
    assert await LearnerStandIn(bus).batch(1) == [0]
    return storage.stores[0].read([0])


async def test_a_stopped_actor_hands_on_turns_and_tokens_across_a_restart_of_storage(bus, engine, tmp_path):
    async with serving(bus, tmp_path, ONE_GROUP):
        await LearnerStandIn(bus).publish(0)
        first = make_worker(bus, engine, environment := TwoTurns(*BOTH), AT_ONCE)
        async with stopped_at_the_end(first):
            await held_in_second_turns(engine, environment)
        assert first.counts["kept_turns"] == 4
        engine.release()
    await engine.load_weights({}, 1)
    engine.requests.clear()
    async with serving(bus, tmp_path, ONE_GROUP) as storage:
        second = make_worker(bus, engine, TwoTurns(), AT_ONCE)
        async with stopped_at_the_end(second):
            found = await trained(bus, storage)
        assert storage.stores[0].turns.of(0) == []
    assert len(engine.requests) == 2  # the rest of each second turn, and nothing else
    assert (second.counts["reused_turns"], second.counts["reused_tokens"]) == (4, 2 * (6 + 3))
    assert [t.sample for t in found] == [0, 1]
    for trajectory in found:
        turns = [slice(turn.start, turn.stop) for turn in trajectory.turns]
        assert [trajectory.token_ids[turn].tolist() for turn in turns] == [ANSWER, ANSWER]
        assert trajectory.policy_versions[turns[0]].tolist() == [0] * 6
        assert trajectory.policy_versions[turns[1]].tolist() == [0] * 3 + [1] * 3
        halves = [-0.10, -0.11, -0.12]
        assert np.allclose(trajectory.behaviour_logprobs[turns[1]], [*halves, *halves])
        assert trajectory.oldest_version == 0
    assert await messages(bus, "DEAD") == 0


async def test_an_actor_that_waits_for_leases_finds_the_turns_of_one_that_stops(bus, engine, tmp_path):
    """The lease is handed back when the shard has them, however long it gathers what comes."""
    with opened(bus, tmp_path, ONE_GROUP) as storage:
        storage.dispatcher.admit()
        storage.shards[0] = Shard(
            bus, storage.stores[0], 0, shards=2, was_issued=storage.ledger.was_issued, linger_s=0.5
        )
        async with running(lambda stop: storage.run(stop, reissue=False)):
            await LearnerStandIn(bus).publish(0)
            environment = TwoTurns(*BOTH)
            second = make_worker(bus, engine, TwoTurns(), AT_ONCE)
            async with stopped_at_the_end(make_worker(bus, engine, environment, AT_ONCE)):
                await until(lambda: len(environment.in_between) == 2)
                waiting = asyncio.create_task(second.run(stop := asyncio.Event(), groups_at_once=4))
            await trained(bus, storage)
            stop.set()
            await asyncio.wait_for(waiting, 20)
    assert second.counts["reused_turns"] == 2


async def test_a_killed_actor_costs_only_what_came_since_its_turns_were_kept(bus, engine, tmp_path):
    await expect_redelivery_after(bus, 1.0, "rollout")
    often = InterruptionConfig(keep_turns_every_s=0.01)
    async with serving(bus, tmp_path, ONE_GROUP) as storage:
        await LearnerStandIn(bus).publish(0)
        first = make_worker(bus, engine, TwoTurns("g00000000.1"), often)
        async with killed_at_the_end(first):
            await until(lambda: storage.stores[0].trajectories == 1)
            await until(lambda: [turn.rollout for turn in storage.stores[0].turns.of(0)].count(1) == 1)
        engine.requests.clear()
        second = make_worker(bus, engine, TwoTurns(), AT_ONCE)
        async with stopped_at_the_end(second):
            found = await trained(bus, storage)
    assert len(engine.requests) == 1  # the second turn of the second rollout
    assert (second.counts["reused"], second.counts["reused_turns"], second.counts["trajectories"]) == (
        1,
        1,
        1,
    )
    assert [t.sample for t in found] == [0, 1]
    assert [len(t.turns) for t in found] == [2, 2]


async def test_an_actor_whose_engines_are_lost_keeps_the_turns_that_it_had(bus, engine, tmp_path):
    async def lost(request):
        raise EngineLostError("all engines are gone")

    async with serving(bus, tmp_path, ONE_GROUP) as storage:
        await LearnerStandIn(bus).publish(0)
        environment = TwoTurns(*BOTH)
        worker = make_worker(bus, engine, environment, AT_ONCE)
        task = asyncio.create_task(worker.run(asyncio.Event(), groups_at_once=4))
        await until(lambda: len(environment.in_between) == 2)
        engine.generate = lost
        environment.gate.set()
        await asyncio.wait([task], timeout=60)
        assert task.exception().subgroup(EngineLostError)
        await until(lambda: [turn.rollout for turn in storage.stores[0].turns.of(0)] == [0, 1])


@pytest.mark.parametrize("at_once", [True, False])
async def test_lost_engines_cost_no_turns_of_a_lease_beside_one_without_any(bus, engine, tmp_path, at_once):
    """That one ends first, which cancels the other: while it stores its turns, or still in its tool."""

    async def lost(request):
        raise EngineLostError("all engines are gone")

    two_groups = AdmissionConfig(groups_per_step=2, samples_per_prompt=2, max_staleness=0)
    async with serving(bus, tmp_path, two_groups) as storage:
        await LearnerStandIn(bus).publish(0)
        environment = TwoTurns(*BOTH, late=("g00000001.0", "g00000001.1"))
        worker = make_worker(bus, engine, environment, AT_ONCE)
        task = asyncio.create_task(worker.run(asyncio.Event(), groups_at_once=4))
        await until(lambda: len(environment.in_between) == len(environment.not_begun) == 2)
        engine.generate = lost
        environment.entrance.set()
        if at_once:
            environment.gate.set()
        await asyncio.wait([task], timeout=60)
        assert task.exception().subgroup(EngineLostError)
        assert [turn.rollout for turn in storage.stores[0].turns.of(0)] == [0, 1]


async def test_a_bus_that_takes_nothing_does_not_hold_up_an_actor_without_engines(bus, engine, monkeypatch):
    async def lost(request):
        raise EngineLostError("all engines are gone")

    monkeypatch.setattr("actors.rollouts.leases.KEEP_TURNS_S", 0.1)
    data = encode(make_lease(0, samples=2))
    await Publisher(bus).publish(bus.subject("tasks", "rollout"), data, message_id="lease-0")
    environment = TwoTurns("g00000000.1")
    worker = make_worker(bus, engine, environment, AT_ONCE, share_after_s=60.0)
    with capture_logs() as logs:
        task = asyncio.create_task(worker.run(asyncio.Event(), groups_at_once=4))
        await until(lambda: environment.ended == ["g00000000.0"] and len(environment.in_between) == 2)
        await bus.js.delete_stream(bus.topology.stream("TRAJECTORIES"))
        engine.generate = lost
        environment.gate.set()
        await asyncio.wait([task], timeout=60)
    assert task.exception().subgroup(EngineLostError)
    warnings = [line["event"] for line in logs if line["log_level"] == "warning"]
    assert warnings == ["siblings_not_handed_on", "turns_not_kept"]


async def test_finished_rollouts_of_a_group_that_is_only_sent_whole_are_not_sampled_again(
    bus, engine, tmp_path
):
    async with serving(bus, tmp_path, ONE_GROUP) as storage:
        await LearnerStandIn(bus).publish(0)
        environment = TwoTurns("g00000000.1", per_episode=None)
        async with stopped_at_the_end(make_worker(bus, engine, environment, AT_ONCE)):
            await until(lambda: environment.ended == ["g00000000.0"] and len(environment.in_between) == 2)
        assert storage.stores[0].trajectories == 0
        engine.requests.clear()
        second = make_worker(bus, engine, TwoTurns(per_episode=None), AT_ONCE)
        async with stopped_at_the_end(second):
            found = await trained(bus, storage)
    assert (len(engine.requests), second.counts["reused_turns"]) == (1, 3)
    assert [t.rollout for t in found] == [0, 1]


async def test_what_an_environment_asks_otherwise_than_before_is_sampled(bus, engine, tmp_path):
    async with serving(bus, tmp_path, ONE_GROUP) as storage:
        await LearnerStandIn(bus).publish(0)
        environment = TwoTurns(*BOTH)
        async with stopped_at_the_end(make_worker(bus, engine, environment, AT_ONCE)):
            await held_in_second_turns(engine, environment)
        engine.release()
        await engine.load_weights({}, 1)
        second = make_worker(bus, engine, TwoTurns(second="2+2="), AT_ONCE)
        async with stopped_at_the_end(second):
            found = await trained(bus, storage)
    assert second.counts["reused_turns"] == 2  # the first ones
    for trajectory in found:
        first, last = trajectory.turns
        assert trajectory.policy_versions[first.start : first.stop].tolist() == [0] * 6
        assert trajectory.policy_versions[last.start : last.stop].tolist() == [1] * 6


async def test_rollouts_that_end_soon_after_the_stop_are_finished(bus, engine, tmp_path):
    async with serving(bus, tmp_path, ONE_GROUP) as storage:
        await LearnerStandIn(bus).publish(0)
        environment = TwoTurns(*BOTH)
        worker, stop = make_worker(bus, engine, environment, InterruptionConfig()), asyncio.Event()
        working = asyncio.create_task(worker.run(stop, groups_at_once=4))
        await until(lambda: len(environment.in_between) == 2)
        stop.set()
        environment.gate.set()
        await asyncio.wait_for(working, 20)
        assert len(await trained(bus, storage)) == 2
        assert worker.counts["kept_turns"] == 0


async def test_turns_of_weights_older_than_a_lease_may_have_are_not_kept(bus, engine, tmp_path):
    """A resumed learner's older weights came: what they sampled is rolled out again in any case."""
    async with serving(bus, tmp_path, ONE_GROUP) as storage:
        await engine.load_weights({}, 5)
        await LearnerStandIn(bus, trains_from=5).publish(5)
        environment = TwoTurns(*BOTH)
        worker = make_worker(bus, engine, environment, AT_ONCE)
        async with stopped_at_the_end(worker):
            await until(lambda: len(environment.in_between) == 2)
            engine.hold()
            await engine.load_weights({}, 3)
            environment.gate.set()
            await until(lambda: engine.running == 2)
        assert [turn.number for turn in storage.stores[0].turns.of(0)] == [0, 0]


async def test_turns_of_weights_older_than_a_lease_may_have_are_not_used(bus, engine, tmp_path):
    """They would cost the whole rollout: it is thrown away at its end, and begun again."""
    async with serving(bus, tmp_path, ONE_GROUP) as storage:
        await engine.load_weights({}, 5)
        await LearnerStandIn(bus, trains_from=5).publish(5)
        environment, store = TwoTurns(*BOTH), storage.stores[0]
        async with stopped_at_the_end(make_worker(bus, engine, environment, AT_ONCE)):
            await until(lambda: len(environment.in_between) == 2)
        old, _ = store.turns.of(0)
        store.turns.keep([replace(old, policy_versions=old.policy_versions - 1)])
        engine.requests.clear()
        second = make_worker(bus, engine, environment := TwoTurns(), AT_ONCE)
        async with stopped_at_the_end(second):
            await until(lambda: store.trajectories == 2)
    assert (len(engine.requests), second.counts["reused_turns"]) == (3, 1)
    assert len(environment.ended) == 2


async def test_turns_of_a_resumed_learners_weights_are_kept_once_the_lease_may_have_them(
    bus, engine, tmp_path, monkeypatch
):
    monkeypatch.setattr(leases, "WEIGHTS_PATIENCE_S", 0.1)
    async with serving(bus, tmp_path, ONE_GROUP) as storage:
        await engine.load_weights({}, 5)
        await LearnerStandIn(bus, trains_from=5).publish(5)
        environment = TwoTurns(*BOTH)
        async with stopped_at_the_end(make_worker(bus, engine, environment, AT_ONCE)):
            await held_in_second_turns(engine, environment)
            environment.gate = asyncio.Event()
            resumed = LearnerStandIn(bus, incarnation="b", trains_from=3)
            await resumed.resume(0)
            await resumed.publish(3)
            await engine.load_weights({}, 3)
            engine.release()
            # Both are found too old before the lease may have version 3: then neither is taken as it is.
            await until(lambda: len(environment.ended) == 2)
            await resumed.ask(1)  # its step needs the group, so weights of version 3 may sample it
            await until(lambda: len(environment.in_between) == 4)  # both rollouts were begun again
        kept = [(turn.number, *set(turn.policy_versions.tolist())) for turn in storage.stores[0].turns.of(0)]
        assert kept == [(0, 3), (0, 3)]
