"""Leases that come back: what another actor finished is kept, and what kills its actors is quarantined."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest

from actors.environments.single_turn import SingleTurn
from actors.rewards.scoring.scorers import Scorer
from actors.rollouts.worker import Worker
from benchmarks.scripted_engine import ScriptedEngine
from bus.codec import encode
from bus.connection import Bus
from bus.streams.consume import Inbox
from bus.streams.publish import Publisher
from storage.settings.admission import AdmissionConfig
from tests.actors import workers
from tests.actors.workers import TOKENIZER, killed_at_the_end
from tests.factories import make_lease, make_trajectory
from tests.storage.serving import (
    LearnerStandIn,
    Storage,
    dead_letters,
    expect_redelivery_after,
    has,
    leases,
    opened,
    running,
    send,
    serving,
    until,
)

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]
ONE_GROUP = AdmissionConfig(groups_per_step=1, samples_per_prompt=3, max_staleness=0)


class Scripted:
    """An environment in which rollouts can be held, and some prompts end the process that rolls them out."""

    def __init__(self, *held: str, lethal: str = "", per_episode: int | None = 1) -> None:
        self.trajectories_per_episode = per_episode
        self.began: list[str] = []
        self.released = asyncio.Event()
        self._held = held
        self._lethal = lethal
        self._inner = SingleTurn(Scorer("one", timeout_s=60, reward=lambda answer: 1.0))

    async def run(self, task, policy):
        self.began.append(task.task_id)
        if task.prompt == self._lethal:
            raise MemoryError(task.prompt)  # no error of ours: it ends the worker
        if task.task_id in self._held:
            await self.released.wait()
        return await self._inner.run(task, policy)


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    ids = [*TOKENIZER("0", add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]
    engine = ScriptedEngine(lambda tokens: ids)
    await engine.start()
    yield engine
    await engine.close()


make_worker = partial(workers.make_worker, max_new_tokens=8)


def at_work(worker: Worker):
    return running(lambda stop: worker.run(stop, groups_at_once=4))


async def publish_lease(bus: Bus, lease) -> None:
    await Publisher(bus).publish(bus.subject("tasks", "rollout"), encode(lease), message_id="lease")


async def stored(storage: Storage, count: int) -> None:
    await until(lambda: sum(store.trajectories for store in storage.stores) == count)


# --- siblings ---


async def test_the_next_actor_rolls_out_only_what_a_killed_one_had_not_finished(bus, engine, tmp_path):
    await expect_redelivery_after(bus, 2.0, "rollout")
    async with serving(bus, tmp_path, ONE_GROUP) as storage:
        await LearnerStandIn(bus).publish(0)
        async with killed_at_the_end(make_worker(bus, engine, Scripted("g00000000.1"))):
            await stored(storage, 2)
        second = Scripted()
        worker = make_worker(bus, engine, second)
        async with at_work(worker):
            assert await LearnerStandIn(bus).batch(1) == [0]
            await has(bus, "TASKS", 0)
        assert second.began == ["g00000000.1"]
        assert (worker.counts["reused"], worker.counts["trajectories"], worker.counts["groups"]) == (2, 1, 1)
        assert [t.sample for t in storage.stores[0].read([0])] == [0, 1, 2]


async def test_finished_siblings_stay_with_their_actor_when_sharing_is_off(bus, engine, tmp_path):
    environment = Scripted("g00000000.1")
    async with serving(bus, tmp_path, ONE_GROUP) as storage:
        await LearnerStandIn(bus).publish(0)
        async with at_work(make_worker(bus, engine, environment, share_after_s=None)):
            await until(lambda: len(engine.requests) == 2)
            assert isinstance((await LearnerStandIn(bus).ask(1)).reason, str)  # two seconds later
            assert storage.stores[0].trajectories == 0
            environment.released.set()
            assert await LearnerStandIn(bus).batch(1) == [0]


async def test_a_lease_published_again_is_completed_in_the_size_its_siblings_say(bus, engine, tmp_path):
    """Whatever `samples_per_prompt` has become since."""
    environment = Scripted()
    with opened(bus, tmp_path) as storage:
        async with running(storage.shards[0].run), at_work(make_worker(bus, engine, environment)):
            storage.ledger.issue(1, policy_version=0)
            await send(bus, make_trajectory(0, 1, group_size=3))
            await stored(storage, 1)
            lease = make_lease(0, samples=5)
            await publish_lease(
                bus,
                type(lease)(lease_id=0, prompt=lease.prompt, samples=5, policy_version=0, republished=True),
            )
            await until(lambda: storage.stores[0].completed == [0])
    assert environment.began == ["g00000000.0", "g00000000.2"]


async def test_a_settled_lease_that_comes_back_waits_for_no_weights(bus, engine, tmp_path):
    environment = Scripted()
    worker = make_worker(bus, engine, environment, share_after_s=None)
    async with serving(bus, tmp_path, ONE_GROUP), at_work(worker):
        await LearnerStandIn(bus).publish(0)
        assert await LearnerStandIn(bus).batch(1) == [0]
        lease = make_lease(0, samples=3)
        never = type(lease)(lease_id=0, prompt=lease.prompt, samples=3, policy_version=99, republished=True)
        await publish_lease(bus, never)
        await until(lambda: worker.counts["settled"] == 1)
        await has(bus, "TASKS", 0)
    assert len(environment.began) == 3


async def test_without_an_answer_from_storage_everything_is_rolled_out(bus, engine):
    environment = Scripted()
    lease = make_lease(0, samples=2)
    async with at_work(make_worker(bus, engine, environment, share_after_s=None)):
        await publish_lease(
            bus, type(lease)(lease_id=0, prompt=lease.prompt, samples=2, policy_version=0, republished=True)
        )
        await has(bus, "TRAJECTORIES", 1)
        await has(bus, "TASKS", 0)
    assert environment.began == ["g00000000.0", "g00000000.1"]


@pytest.mark.parametrize(("reward", "kept"), [(0.0, True), (1.0, False)])
async def test_the_group_filter_sees_the_rewards_of_reused_siblings(bus, engine, tmp_path, reward, kept):
    """The scripted answer is worth 1."""
    with opened(bus, tmp_path) as storage:
        storage.ledger.issue(1, policy_version=0)
        async with running(lambda stop: storage.run(stop, reissue=False)):
            await send(bus, make_trajectory(0, 0, reward=reward))
            await stored(storage, 1)
            lease = make_lease(0)
            await publish_lease(
                bus,
                type(lease)(lease_id=0, prompt=lease.prompt, samples=2, policy_version=0, republished=True),
            )
            async with at_work(make_worker(bus, engine, Scripted(), keep="zero_variance")):
                await until(lambda: not storage.ledger.rolling_out)
        assert (list(storage.ledger.stored) == [0]) == kept
        assert storage.ledger.reasons == ({} if kept else {"zero_variance": 1})


async def test_a_group_shared_early_and_rejected_in_the_end_is_never_given_to_a_step(bus, engine, tmp_path):
    environment = Scripted("g00000000.1")
    async with serving(bus, tmp_path, ONE_GROUP) as storage:
        await LearnerStandIn(bus).publish(0)
        async with at_work(make_worker(bus, engine, environment, keep="zero_variance")):
            await stored(storage, 2)
            environment.released.set()
            await until(lambda: storage.ledger.reasons["zero_variance"] > 0)
            await send(bus, make_trajectory(0, 1, group_size=3))  # a twin that another actor finished
            await until(lambda: storage.stores[0].completed == [0])
            assert (await LearnerStandIn(bus).ask(1)).reason.startswith("0 of 1 groups are stored")
        assert 0 not in storage.ledger.stored


async def test_a_group_with_a_failed_episode_is_stored_and_given_to_a_step(bus, engine, tmp_path):
    class FailsOnce(Scripted):
        async def run(self, task, policy):
            if task.task_id.endswith(".1"):
                raise ZeroDivisionError("mine")
            return await super().run(task, policy)

    learner = LearnerStandIn(bus)
    async with serving(bus, tmp_path, ONE_GROUP) as storage:
        await learner.publish(0)
        async with at_work(make_worker(bus, engine, FailsOnce())):
            await until(lambda: storage.stores[0].completed == [0])
            assert await learner.batch(1) == [0]
        ends = [trajectory.end for trajectory in storage.stores[0].read([0])]
    assert ends == ["completed", "environment_error", "completed"]


async def test_an_environment_that_breaks_its_promise_fails_its_rollouts(bus, engine, tmp_path):
    async with serving(bus, tmp_path, ONE_GROUP) as storage:
        await LearnerStandIn(bus).publish(0)
        async with at_work(make_worker(bus, engine, Scripted(per_episode=2))):
            await until(lambda: storage.ledger.reasons["rollout_failed"] > 0)
        assert storage.stores[0].trajectories == 0


# --- weights ---


async def test_a_lease_of_a_dead_learners_version_is_sampled_once_the_step_needs_it(bus, engine, tmp_path):
    """The learner resumes with larger batches: the groups taken back do not last until version 2."""
    learner = LearnerStandIn(bus)
    small = AdmissionConfig(groups_per_step=1, samples_per_prompt=2, max_staleness=0)
    async with serving(bus, tmp_path, small) as storage:
        await learner.resume(0)
        for step in (1, 2):
            await learner.publish(step - 1)
            await until(lambda step=step: storage.ledger.next_id == step)
            await send(bus, *(make_trajectory(step - 1, n, policy_version=step - 1) for n in range(2)))
            await learner.batch(step)
        await learner.publish(2)
        await until(lambda: storage.ledger.next_id == 3)
    await bus.js.purge_stream(bus.topology.stream("TASKS"), keep=1)  # nobody acked the first two
    larger = AdmissionConfig(groups_per_step=3, samples_per_prompt=2, max_staleness=0)
    async with serving(bus, tmp_path, larger) as storage, at_work(make_worker(bus, engine, Scripted())):
        await until(lambda: storage.ledger.next_id == 5)
        second = LearnerStandIn(bus, "b")
        await second.resume(0)
        await second.publish(0)
        assert engine.policy_version == 0
        assert await second.batch(1) == [0, 2, 1]
        assert {t.oldest_version for t in storage.stores[0].read([2])} == {0}
    assert sorted(lease.lease_id for lease in await leases(bus)) == [3, 4]  # version 2's: handed back


async def test_a_rollout_into_which_older_weights_came_is_repeated(bus, engine):
    """A resumed learner's first version may reach the engine in mid-generation."""
    await engine.load_weights({}, 5)
    engine.hold()
    worker = make_worker(bus, engine, Scripted())
    async with at_work(worker):
        await publish_lease(bus, make_lease(0, samples=1, policy_version=5))
        await until(lambda: engine.running == 1)
        await engine.load_weights({}, 3)
        engine.release()
        await until(lambda: len(engine.requests) == 1 and engine.running == 0)
        await engine.load_weights({}, 5)
        await has(bus, "TRAJECTORIES", 1)
    assert len(engine.requests) == 2


async def test_a_rollout_that_waits_to_be_repeated_is_handed_back_when_its_actor_stops(bus, engine):
    await engine.load_weights({}, 5)
    engine.hold()
    worker, stop = make_worker(bus, engine, Scripted()), asyncio.Event()
    working = asyncio.create_task(worker.run(stop, groups_at_once=1))
    await publish_lease(bus, make_lease(0, samples=2, policy_version=5))
    await until(lambda: engine.running == 2)
    await engine.load_weights({}, 3)
    stop.set()
    engine.release()
    await asyncio.wait_for(working, 20)
    await has(bus, "TASKS", 1)
    assert worker.counts["rejected"] == 0


# --- quarantine ---


async def test_a_prompt_that_kills_its_actors_is_quarantined_and_the_others_are_not(bus, engine, tmp_path):
    await expect_redelivery_after(bus, 1.0, "rollout")
    admission = AdmissionConfig(groups_per_step=2, samples_per_prompt=2, max_staleness=1, max_deliver=4)
    deaths = 0
    async with serving(bus, tmp_path, admission) as storage:
        await LearnerStandIn(bus).publish(0)
        await has(bus, "TASKS", 4)
        data = storage.data
        lethal = data.prompt(2)
        async with asyncio.timeout(120):
            while not data.quarantined or storage.ledger.rolling_out:
                environment = Scripted(lethal=lethal.content)
                stop = asyncio.Event()
                task = asyncio.create_task(make_worker(bus, engine, environment).run(stop, groups_at_once=4))
                await until(
                    lambda task=task: (
                        task.done() or bool(data.quarantined and not storage.ledger.rolling_out)
                    ),
                    seconds=60,
                )
                stop.set()
                await asyncio.wait([task])
                if task.exception() is not None:
                    assert isinstance(task.exception(), ExceptionGroup)
                    deaths += 1
        assert 5 <= deaths <= 7  # a dead actor's open request may have taken a delivery or two
        assert storage.ledger.reasons["quarantined"] == 1
        assert storage.ledger.account().balanced()
        [letter] = await dead_letters(bus)
        assert "lease 2: quarantined" in letter.reason
        assert sorted(storage.ledger.stored) == [0, 1, 3, 4]
    with opened(bus, tmp_path, admission) as storage:  # also after a restart, in every epoch
        assert storage.data.quarantined == 1
        quarantined = [n for n in range(28) if storage.data.is_quarantined(n)]
        assert [storage.data.prompt(n) for n in quarantined] == [lethal] * 4


async def test_actors_that_stop_kindly_accuse_no_prompt(bus, engine, tmp_path, monkeypatch):
    async with serving(bus, tmp_path, ONE_GROUP) as storage:
        facts: list[tuple[str, str]] = []
        set_fact = storage.ledger.set_fact
        monkeypatch.setattr(storage.ledger, "set_fact", lambda *new: (facts.append(new), set_fact(*new)))
        await LearnerStandIn(bus).publish(0)
        inbox = Inbox(bus, "TASKS", "rollout")
        for _ in range(8):
            [raw] = await inbox.take(1, 20.0)
            await raw.nak()
        async with at_work(make_worker(bus, engine, Scripted())):
            assert await LearnerStandIn(bus).batch(1) == [0]
        assert [fact for fact in facts if fact[0] == "attempts.0"] == [("attempts.0", "1")]
        assert "attempts.0" not in storage.ledger.facts  # nobody asks about it any more
        assert not storage.data.quarantined


async def handed_back(bus: Bus, count: int, times: int) -> None:
    """Deliver `count` leases and return them, as actors do that are stopped, `times` over."""
    inbox = Inbox(bus, "TASKS", "rollout")
    for _ in range(times * count):
        [raw] = await inbox.take(1, 20.0)
        await raw.nak()


async def test_after_a_rolling_restart_leases_are_rolled_out_together(bus, engine, tmp_path):
    admission = AdmissionConfig(groups_per_step=3, samples_per_prompt=1, max_staleness=0)
    environment = Scripted(*(f"g{n:08d}.0" for n in range(3)))
    async with serving(bus, tmp_path, admission):
        await LearnerStandIn(bus).publish(0)
        await has(bus, "TASKS", 3)
        await handed_back(bus, 3, times=4)
        async with at_work(make_worker(bus, engine, environment)):
            await until(lambda: len(environment.began) == 3)
            environment.released.set()
            await has(bus, "TASKS", 0)


async def test_an_actor_that_is_cancelled_or_ended_by_another_lease_accuses_no_prompt(bus, engine, tmp_path):
    class EndsOnce(Scripted):
        async def run(self, task, policy):
            self.began.append(task.task_id)
            await self.released.wait()
            if task.task_id.startswith("g00000000"):
                raise MemoryError(task.prompt)
            await asyncio.Event().wait()

    admission = AdmissionConfig(groups_per_step=2, samples_per_prompt=1, max_staleness=0)
    async with serving(bus, tmp_path, admission) as storage:
        await LearnerStandIn(bus).publish(0)
        await has(bus, "TASKS", 2)
        await handed_back(bus, 2, times=2)
        environment = EndsOnce()
        task = asyncio.create_task(
            make_worker(bus, engine, environment).run(asyncio.Event(), groups_at_once=4)
        )
        await until(lambda: len(environment.began) == 2)
        assert [storage.ledger.facts[f"attempts.{n}"] for n in (0, 1)] == ["1", "1"]
        environment.released.set()
        await asyncio.wait([task])
        assert isinstance(task.exception(), ExceptionGroup)
        assert [storage.ledger.facts[f"attempts.{n}"] for n in (0, 1)] == ["1", "0"]


async def test_a_lease_that_is_settled_when_it_comes_back_costs_nothing(bus, engine, tmp_path):
    environment = Scripted()
    async with serving(bus, tmp_path, ONE_GROUP) as storage:
        await LearnerStandIn(bus).publish(0)
        [raw] = await Inbox(bus, "TASKS", "rollout").take(1, 20.0)
        await send(bus, *(make_trajectory(0, n, group_size=3) for n in range(3)))
        await until(lambda: 0 in storage.ledger.stored)
        await raw.nak()
        async with at_work(make_worker(bus, engine, environment)):
            await has(bus, "TASKS", 0)
    assert not environment.began


async def test_a_lease_that_nobody_can_read_is_refunded_and_another_takes_its_place(bus, engine, tmp_path):
    async with serving(bus, tmp_path, ONE_GROUP) as storage:
        await LearnerStandIn(bus).publish(0)
        [raw] = await Inbox(bus, "TASKS", "rollout").take(1, 20.0)
        await raw.ack()
        await bus.js.publish(raw.subject, b"garbage")
        async with at_work(make_worker(bus, engine, Scripted())):
            assert await LearnerStandIn(bus).batch(1) == [1]
            assert storage.ledger.reasons["set_aside"] == 1
            assert len(await dead_letters(bus)) == 1
