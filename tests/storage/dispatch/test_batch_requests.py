"""The learner asks the dispatcher for batches: which groups are in one, and what a request waits for."""

import asyncio
from dataclasses import replace

import pytest

from bus.errors import FencedError
from bus.requests import BatchLease, BatchRequest, Waiting
from storage.dispatch.admission import Admission
from storage.ledger.given_groups import Use
from storage.settings.admission import AdmissionConfig, FifoSampler, FreshnessSampler, PrioritySampler
from tests.factories import make_trajectory
from tests.storage.dispatch.lease_states import rolled_out, stored
from tests.storage.serving import LearnerStandIn, has, manifest, send, send_groups, serving, until

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]


async def test_asking_again_gives_the_same_groups_also_to_many_at_once(bus, learner, tmp_path):
    async with serving(bus, tmp_path):
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        asking = [asyncio.create_task(learner.batch(1)) for _ in range(5)]
        await send_groups(bus, [0, 1])  # later ones may be stored sooner: each shard has its own pace
        assert {tuple(answer) for answer in await asyncio.gather(*asking)} == {(0, 1)}
        await send_groups(bus, [2, 3])
        await learner.publish(1)
        await has(bus, "TASKS", 6)
        assert await learner.batch(1) == [0, 1]
        assert await learner.batch(2) == [2, 3]


async def test_batch_names_the_shard_of_each_group(bus, learner, tmp_path):
    async with serving(bus, tmp_path) as storage:
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        await rolled_out(bus, storage)
        answer = await learner.ask(1)
        assert isinstance(answer, BatchLease)
        assert [(group.lease_id, group.shard) for group in answer.groups] == [(0, 0), (1, 1)]


async def test_waiting_says_what_for(bus, learner, tmp_path):
    async with serving(bus, tmp_path) as storage:
        assert await learner.ask(1) == Waiting(reason="0 of 2 groups are stored, 0 rolling out")
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        await send_groups(bus, [1, 2, 3])
        await stored(storage, 3)
        assert await learner.batch(1) == [1, 2]
        await learner.publish(1)
        await has(bus, "TASKS", 6)
        await send_groups(bus, [4, 5])
        await stored(storage, 3)
        assert await learner.ask(2) == Waiting(
            reason="group 0, rolling out since version 0, must be trained by version 1"
        )
        await send_groups(bus, [0])
        assert await learner.batch(2) == [0, 3]


async def test_request_that_waits_is_answered_as_soon_as_its_groups_are_stored(
    bus, learner, tmp_path, monkeypatch
):
    monkeypatch.setattr("storage.dispatch.dispatcher.LONG_POLL_S", 60.0)
    async with serving(bus, tmp_path):
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        asking = asyncio.create_task(learner.ask(1))
        for lease_id in range(3):
            await send_groups(bus, [lease_id])
        async with asyncio.timeout(60):
            assert isinstance(await asking, BatchLease)


async def test_request_that_waits_is_answered_when_storage_ends(bus, learner, tmp_path, monkeypatch):
    monkeypatch.setattr("storage.dispatch.dispatcher.LONG_POLL_S", 60.0)
    subject = bus.subject("rpc", "batch")
    request = BatchRequest(step=1, policy_version=0, incarnation="a")
    async with serving(bus, tmp_path):
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        asking = asyncio.create_task(bus.request(subject, request, Waiting, timeout_s=30.0))
        await until(lambda: any(task.get_name() == f"serve {subject}" for task in asyncio.all_tasks()))
    assert await asking == Waiting(reason="storage has ended")


async def test_drawn_groups_carry_their_weights_and_are_the_same_after_a_restart(bus, learner, tmp_path):
    sampler = FreshnessSampler(max_reuse=2, importance_exponent=1.0)
    admission = AdmissionConfig(groups_per_step=2, samples_per_prompt=2, max_staleness=1, sampler=sampler)
    async with serving(bus, tmp_path, admission) as storage:
        await learner.resume(0)
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        await rolled_out(bus, storage)
        await learner.batch(1)
        await learner.publish(1)
        await has(bus, "TASKS", 6)
        await rolled_out(bus, storage)
        first = await learner.ask(2)
        assert isinstance(first, BatchLease)
        weights = {group.lease_id: group.weight for group in first.groups}
        # four groups of version 0, half as likely as the two of version 1: chances 1/4 and 1/2, mean 1/3
        assert weights == pytest.approx({n: 4 / 3 if n < 4 else 2 / 3 for n in weights})
    async with serving(bus, tmp_path, admission) as storage:
        assert await learner.ask(2) == first
        second = LearnerStandIn(bus, "b")
        await second.resume(1)  # rolled back, and drawn again of the same groups with the same seed
        assert (await second.ask(2)).groups == first.groups
        with pytest.raises(FencedError, match="was replaced by b"):
            await learner.ask(2)
        assert storage.ledger.samples == 4
        assert storage.ledger.account().balanced()


async def test_groups_are_trained_on_again_but_never_more_often_than_configured(bus, learner, tmp_path):
    sampler = FifoSampler(max_reuse=2, min_samples_per_insert=2)
    admission = AdmissionConfig(groups_per_step=2, samples_per_prompt=2, max_staleness=3, sampler=sampler)
    async with serving(bus, tmp_path, admission) as storage:
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        await send_groups(bus, range(3))
        await stored(storage, 3)
        for step, groups in ((1, [0, 1]), (2, [2, 0]), (3, [1, 2])):
            assert await learner.batch(step) == groups
            await learner.publish(step)
            await until(lambda step=step: storage.dispatcher.policy == manifest(step))
        assert isinstance(await learner.ask(4), Waiting)
        assert (storage.ledger.samples, storage.ledger.account().trained) == (6, 3)


async def test_priority_knows_how_far_apart_the_rewards_of_a_group_are(bus, learner, tmp_path):
    admission = AdmissionConfig(
        groups_per_step=2, samples_per_prompt=2, max_staleness=1, sampler=PrioritySampler()
    )
    async with serving(bus, tmp_path, admission) as storage:
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        for lease_id in range(3):
            await send(bus, *(make_trajectory(lease_id, n, reward=float(n * lease_id)) for n in range(2)))
        parts = [
            make_trajectory(3, n, group_size=4, reward=reward)
            for n, reward in enumerate([0.0, 3.0, 10.0, 10.0])
        ]
        critics = [replace(t, agent="critic", rollout=t.rollout - 2) for t in parts[2:]]
        await send(bus, *parts[:2], *critics)
        await stored(storage, 4)
        spreads = {lease.lease_id: lease.spread for lease in storage.ledger.stored.values()}
        assert spreads == {0: 0.0, 1: 0.5, 2: 1.0, 3: 0.75}  # 1.5 between solvers, 0 between critics
        assert 0 not in await learner.batch(1)


async def test_waiting_request_looks_for_a_batch_only_once_there_are_enough_groups(
    bus, learner, tmp_path, monkeypatch
):
    """Each of ten thousand groups that roll out is news when it is stored."""
    monkeypatch.setattr("storage.dispatch.dispatcher.LONG_POLL_S", 60.0)
    looks: list[int] = []
    batch = Admission.batch

    def looking(self: Admission, step: int, train_version: int, *, now_s: float) -> list[Use] | str:
        looks.append(step)
        return batch(self, step, train_version, now_s=now_s)

    monkeypatch.setattr(Admission, "batch", looking)
    async with serving(bus, tmp_path, AdmissionConfig(groups_per_step=4, samples_per_prompt=2)) as storage:
        await learner.publish(0)
        await until(lambda: storage.ledger.next_id > 0)
        asking = asyncio.create_task(learner.ask(1))
        await until(lambda: looks == [1])
        for lease_id in range(4):
            await send_groups(bus, [lease_id])
            await until(lambda count=lease_id + 1: storage.ledger.inserted() == count)
        assert isinstance(await asking, BatchLease)
    assert looks == [1, 1]
