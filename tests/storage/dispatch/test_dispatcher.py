"""The dispatcher on a real bus, with real shards: admission, batches, refunds, fences, restarts."""

import asyncio
from contextlib import closing
from dataclasses import replace

import pytest

from bus.codec import encode
from bus.connection import Bus
from bus.consume import Inbox
from bus.errors import BusError, FencedError, LostDataError, StorageError
from bus.publish import Publisher
from bus.requests import BatchLease, BatchRequest, Waiting
from bus.roles import hold_role
from bus.topology import ensure
from storage.config import AdmissionConfig, FifoSampler, FreshnessSampler, PrioritySampler
from storage.dispatch.admission import Admission
from storage.dispatch.given_groups import Use
from storage.dispatch.ledger import Ledger
from storage.prompts.epochs import PromptOrder
from tests.factories import make_lease, make_trajectory
from tests.storage.dispatch.test_ledger import on_disk
from tests.storage.serving import (
    PROMPTS,
    SHARDS,
    LearnerStandIn,
    Storage,
    has,
    leases,
    manifest,
    messages,
    opened,
    refusing_disk,
    running,
    send,
    send_groups,
    send_rejections,
    serving,
    until,
)

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]


async def stored(storage: Storage, count: int) -> None:
    """Return once the ledger knows of so many groups that wait for a step."""
    await until(lambda: len(storage.ledger.stored) == count)


async def rolled_out(bus: Bus, storage: Storage) -> None:
    """Everything issued is rolled out and known to be stored."""
    expected = len(storage.ledger.stored) + len(storage.ledger.rolling_out)
    await send_groups(bus, list(storage.ledger.rolling_out))
    await stored(storage, expected)


# --- admission ---


async def test_bound_is_issued_at_the_start_and_a_batch_for_each_version(bus, learner, tmp_path):
    async with serving(bus, tmp_path) as storage:
        await learner.publish(0)
        await has(bus, "TASKS", 4)  # (max_staleness + 1) * groups_per_step
        for version in (1, 2):
            await rolled_out(bus, storage)
            await learner.batch(version)
            assert storage.dispatcher.room() == 0  # given to a step is not trained
            await learner.publish(version)
            await has(bus, "TASKS", 4 + 2 * version)
        assert storage.dispatcher.room() == 0
    order = PromptOrder(len(PROMPTS), seed=0, shuffle=True)
    issued = await leases(bus)
    assert [(lease.lease_id, lease.policy_version) for lease in issued] == [
        *((n, 0) for n in range(4)), *((n, 1) for n in (4, 5)), *((n, 2) for n in (6, 7))
    ]  # fmt: skip
    assert [lease.prompt for lease in issued] == [PROMPTS[order.index(n)] for n in range(8)]
    assert {lease.samples for lease in issued} == {2}


async def test_version_without_its_batch_issues_nothing(bus, learner, tmp_path):
    """What was trained is read from the ledger, not computed from the version."""
    async with serving(bus, tmp_path) as storage:
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        await learner.publish(3)
        await until(lambda: storage.dispatcher.policy == manifest(3))
        assert storage.dispatcher.room() == 0


async def test_versions_of_the_warm_up_do_not_count(bus, learner, tmp_path):
    async with serving(bus, tmp_path) as storage:
        learner.trains_from = 7
        await learner.publish(7)
        await has(bus, "TASKS", 4)
        await rolled_out(bus, storage)
        assert await learner.batch(1) == [0, 1]
        await learner.publish(8)
        await has(bus, "TASKS", 6)


async def test_nothing_is_issued_before_the_prompts_are_admitted_and_the_learner_wants_rollouts(
    bus, learner, tmp_path
):
    async with serving(bus, tmp_path, admit=False) as storage:
        dispatcher = storage.dispatcher
        assert dispatcher.room() == 0
        await learner.publish(0, stage="warmup")
        await until(lambda: dispatcher.policy == manifest(0, stage="warmup"))
        dispatcher.admit()
        assert dispatcher.room() == 0
        assert isinstance(await learner.ask(1), Waiting)
        assert storage.ledger.next_id == 0
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        await learner.publish(0, stage="done")
        await until(lambda: dispatcher.policy == manifest(0, stage="done"))
        await send_rejections(bus, [0])
        await until(lambda: storage.ledger.account().rejected == 1)
        assert dispatcher.room() == 0


async def test_policy_whose_notice_was_lost_is_found_under_its_key(bus, tmp_path):
    await bus.put("policy", manifest(0))
    async with serving(bus, tmp_path):
        await has(bus, "TASKS", 4)


async def test_rejected_groups_are_issued_again_and_counted_by_reason(bus, learner, tmp_path):
    async with serving(bus, tmp_path) as storage:
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        await send_rejections(bus, [1, 3])
        await has(bus, "TASKS", 6)
        await send_rejections(bus, [1, 4], reason="rollout_failed")  # 1 is settled
        await has(bus, "TASKS", 7)
        assert dict(storage.ledger.reasons) == {"zero_variance": 2, "rollout_failed": 1}
        assert storage.ledger.account().balanced()
        await rolled_out(bus, storage)
        assert await learner.batch(1) == [0, 2]
        assert await learner.batch(2) == [5, 6]


async def test_groups_that_arrive_after_their_rejection_or_twice_change_nothing(bus, learner, tmp_path):
    async with serving(bus, tmp_path) as storage:
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        await send_rejections(bus, [0])
        await has(bus, "TASKS", 5)
        await rolled_out(bus, storage)
        assert await learner.batch(1) == [1, 2]
        await learner.commit(1)
        account = storage.ledger.account()
        for lease_id in (0, 1):  # a redelivered lease, rolled out by somebody else
            trajectories = [make_trajectory(lease_id, sample, reward=0.5) for sample in range(2)]
            await send(bus, *trajectories)
        await send_rejections(bus, [1, 2, 3])  # trained, trained, stored: the first outcome stands
        await until(lambda: 0 in storage.stores[0].completed)
        await until(lambda: storage.ledger.facts["shard_0"] == "3")
        await until(lambda: nothing_pending(bus))
        assert storage.ledger.account() == account
        assert await learner.batch(2) == [3, 4]


async def nothing_pending(bus: Bus) -> bool:
    found = await bus.js.consumer_info(bus.topology.stream("OUTCOMES"), "dispatcher")
    return found.num_pending == 0 and found.num_ack_pending == 0


async def test_groups_beyond_a_step_wait_for_the_next_ones_across_a_restart(bus, learner, tmp_path):
    """All is trained that comes early, and what comes in the place of rejected groups."""
    admission = AdmissionConfig(groups_per_step=2, samples_per_prompt=2, max_staleness=2)
    async with serving(bus, tmp_path, admission) as storage:
        await learner.publish(0)
        await until(lambda: len(storage.ledger.rolling_out) == 6)
        await send_rejections(bus, [1, 4])
        await until(lambda: storage.ledger.reasons["zero_variance"] == 2)
        await until(lambda: len(storage.ledger.rolling_out) == 6)  # others in their place
        await rolled_out(bus, storage)
        assert await learner.batch(1) == [0, 2]
        assert storage.ledger.account().stored == 4
    async with serving(bus, tmp_path, admission) as storage:
        assert sorted(storage.ledger.stored) == [3, 5, 6, 7]
        assert [await learner.batch(step) for step in (2, 3)] == [[3, 5], [6, 7]]
        assert [(use.group.policy_version, step) for step in (2, 3) for use in storage.ledger.uses(step)] == [
            (0, 2),
            (0, 2),
            (0, 3),
            (0, 3),
        ]  # step 3 trains version 2, which is as far as they may lag
        assert dict(storage.ledger.reasons) == {"zero_variance": 2}


async def test_smaller_batches_after_a_resume_issue_only_when_the_surplus_is_trained(bus, learner, tmp_path):
    async with serving(bus, tmp_path) as storage:
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        await rolled_out(bus, storage)
    smaller = AdmissionConfig(groups_per_step=1, samples_per_prompt=2, max_staleness=1)
    async with serving(bus, tmp_path, smaller) as storage:
        await learner.resume(0)
        for step in (1, 2, 3):
            await learner.publish(step - 1)
            await until(lambda step=step: storage.dispatcher.policy == manifest(step - 1))
            assert storage.dispatcher.room() == 0
            if step < 3:
                assert await learner.batch(step) == [step - 1]
        # versions 0 and 1 have trained two of four; the rest, two versions old, is past the bound
        await learner.ask(3)
        assert dict(storage.ledger.reasons) == {"stale": 2}
        await has(bus, "TASKS", 6)


# --- batches ---


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
        async with asyncio.timeout(20):
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
        assert max(weights.values()) == 1.0
        ages = {n: 1 if n < 4 else 0 for n in weights}  # a group of version 0 is half as likely
        assert weights == {n: 1.0 if max(ages.values()) == age else 0.5 for n, age in ages.items()}
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


async def test_group_that_never_completes_is_dropped_and_another_issued(bus, learner, tmp_path):
    admission = AdmissionConfig(
        groups_per_step=2, samples_per_prompt=2, max_staleness=0, incomplete="drop", patience_s=1.0
    )
    async with serving(bus, tmp_path, admission) as storage:
        await learner.publish(0)
        await has(bus, "TASKS", 2)
        await send_groups(bus, [1])
        asking = asyncio.create_task(learner.batch(1))
        await has(bus, "TASKS", 3)
        await send_groups(bus, [2, 0])  # 0 comes too late
        assert await asking == [1, 2]
        assert storage.ledger.reasons == {"incomplete": 1}
        assert storage.ledger.account().balanced()


# --- learners come and go ---


async def test_resumed_learner_gets_the_later_groups_again(bus, learner, tmp_path):
    async with serving(bus, tmp_path) as storage:
        await learner.resume(0)
        for step in (1, 2, 3):
            await learner.publish(step - 1)
            await until(lambda step=step: storage.ledger.next_id == 2 + 2 * step)
            await rolled_out(bus, storage)
            await learner.batch(step)
        await learner.commit(1)
        second = LearnerStandIn(bus, "b")
        await second.resume(1)
        assert storage.ledger.account().trained == 2
        assert storage.ledger.account().balanced()
        await second.publish(1)
        await until(lambda: storage.dispatcher.policy == manifest(1, incarnation="b"))
        assert storage.dispatcher.room() == 0  # the two steps to repeat are ahead of it
        assert await second.batch(2) == [2, 3]
        assert await second.batch(3) == [4, 5]


async def test_learner_that_was_replaced_is_refused(bus, learner, tmp_path):
    async with serving(bus, tmp_path) as storage:
        await learner.resume(0)
        await LearnerStandIn(bus, "b").resume(0)
        with pytest.raises(FencedError, match="learner a was replaced by b"):
            await learner.ask(1)
        with pytest.raises(FencedError, match="learner a was replaced by b"):
            await learner.commit(1)
    with opened(bus, tmp_path) as storage:
        assert storage.ledger.facts["incarnation"] == "b"  # also after a restart


async def test_request_of_a_replaced_learner_that_is_still_waiting_takes_nothing(
    bus, learner, tmp_path, monkeypatch
):
    monkeypatch.setattr("storage.dispatch.dispatcher.LONG_POLL_S", 60.0)
    async with serving(bus, tmp_path) as storage:
        await learner.resume(0)
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        asking = asyncio.create_task(learner.ask(1))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):  # it hangs, as it should
                await asyncio.shield(asking)
        await LearnerStandIn(bus, "b").resume(0)
        with pytest.raises(FencedError, match="was replaced by b"):
            await asking
        await rolled_out(bus, storage)
        assert storage.ledger.steps == {}


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


async def test_suspended_learner_cannot_take_the_run_back_from_its_successor(bus, learner, tmp_path):
    async with serving(bus, tmp_path) as storage:
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        await rolled_out(bus, storage)
        async with hold_role(bus, "learner", "b"):
            second = LearnerStandIn(bus, "b")
            await second.resume(0)
            assert await second.batch(1) == [0, 1]
            with pytest.raises(FencedError, match="learner a was replaced by b"):
                await learner.resume(0)
            assert storage.ledger.account().trained == 2


async def test_policy_of_the_learner_before_does_not_come_back(bus, learner, tmp_path):
    async with serving(bus, tmp_path) as storage:
        await learner.resume(0)
        await learner.publish(3)  # under the key, where each poll finds it
        await until(lambda: storage.dispatcher.policy == manifest(3))
        second = LearnerStandIn(bus, "b")
        await second.resume(0)
        assert storage.dispatcher.policy is None
        assert storage.dispatcher.room() == 0
        answer = manifest(1, incarnation="b")
        await bus.notify(bus.subject("notice", "policy"), answer)
        await until(lambda: storage.dispatcher.policy == answer)
        await learner.publish(4)  # a last word of the old one, as a notice and under the key
        assert isinstance(await second.ask(1), Waiting)  # several polls later
        assert storage.dispatcher.policy == answer


async def test_late_poll_does_not_take_back_a_younger_version(bus, learner, tmp_path):
    async with serving(bus, tmp_path) as storage:
        await learner.publish(1)
        await until(lambda: storage.dispatcher.policy == manifest(1))
        await bus.notify(bus.subject("notice", "policy"), manifest(2))
        await until(lambda: storage.dispatcher.policy == manifest(2))
        await learner.ask(1)  # several polls later
        assert storage.dispatcher.policy == manifest(2)


# --- restarts ---


async def test_restarted_dispatcher_goes_on_where_it_was(bus, learner, tmp_path):
    async with serving(bus, tmp_path) as storage:
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        await send_groups(bus, [0, 1, 2])
        await stored(storage, 3)  # each shard has its own pace
        assert await learner.batch(1) == [0, 1]
        await stored(storage, 1)
        account = storage.ledger.account()
    async with serving(bus, tmp_path) as storage:
        await until(lambda: storage.dispatcher.policy is not None)
        await stored(storage, 1)
        assert storage.ledger.account() == account
        assert await learner.batch(1) == [0, 1]
        assert storage.dispatcher.room() == 0
        await learner.publish(1)
        await has(bus, "TASKS", 6)
    assert [lease.lease_id for lease in await leases(bus)] == list(range(6))


async def test_crash_at_any_moment_issues_no_lease_twice(bus, learner, tmp_path, monkeypatch):
    """Its ledger is what the disk held at that moment; the bus has forgotten what it saw."""
    await bus.js.update_stream(next(s for s in bus.topology.streams() if "TASKS" in s.name).evolve(
        duplicate_window=0.1
    ))  # fmt: skip
    async with serving(bus, tmp_path / "first"):
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        crashed = tmp_path / "second"
        crashed.mkdir()
        ledger = crashed / "ledger.sqlite"

        async def published() -> bool:
            on_disk(tmp_path / "first" / "ledger.sqlite", ledger)
            with closing(Ledger.open(ledger)) as copy:
                return copy.facts.get("published_through") == "3"

        await until(published)
    await asyncio.sleep(0.2)  # the window in which the bus itself would have noticed
    async with serving(bus, crashed) as storage:
        await learner.ask(1)
        assert storage.ledger.next_id == 4
    assert [lease.lease_id for lease in await leases(bus)] == [0, 1, 2, 3]


async def test_leases_that_a_crash_left_unpublished_are_published(bus, learner, tmp_path):
    with opened(bus, tmp_path) as storage:
        storage.ledger.issue(3, policy_version=0)
        storage.ledger.set_fact("published_through", "0")
    await bus.js.publish(bus.subject("tasks", "rollout", 0), encode(make_lease(0)))  # somebody rolls it out
    async with serving(bus, tmp_path):
        await has(bus, "TASKS", 3)
        await learner.publish(0)
        await has(bus, "TASKS", 4)
    assert sorted(lease.lease_id for lease in await leases(bus)) == [0, 1, 2, 3]


async def test_leases_are_on_the_disk_before_they_are_published_and_again_once_they_are(
    bus, learner, tmp_path, monkeypatch
):
    """What a crash at either moment leaves: no lease that an actor has is issued twice or forgotten."""
    before: list[tuple[int, int]] = []
    publish = Publisher.publish

    async def looking(self: Publisher, subject: str, data: bytes, **options: str) -> None:
        copy = tmp_path / f"{len(before)}.sqlite"
        on_disk(tmp_path / "ledger.sqlite", copy)
        with closing(Ledger.open(copy)) as found:
            before.append((found.next_id, int(found.facts.get("published_through", "-1"))))
        await publish(self, subject, data, **options)

    monkeypatch.setattr(Publisher, "publish", looking)
    async with serving(bus, tmp_path):
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        await send_rejections(bus, [1])
        await has(bus, "TASKS", 5)
    assert before == [(4, -1)] * 4 + [(5, 3)]


async def test_bus_that_lost_its_disk_gets_all_that_is_rolling_out_again(bus, learner, tmp_path):
    async with serving(bus, tmp_path) as storage:
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        await send_groups(bus, [0, 2])
        await stored(storage, 2)
        await send_rejections(bus, [1])
        await has(bus, "TASKS", 5)
    await bus.js.delete_stream(bus.topology.stream("TASKS"))
    assert await ensure(bus.js, bus.topology, SHARDS) == {"TASKS"}
    async with serving(bus, tmp_path, reissue=True):
        await has(bus, "TASKS", 2)
    assert [lease.lease_id for lease in await leases(bus)] == [3, 4]


async def test_leases_that_vanished_from_the_bus_are_published_again_while_others_roll_out(
    bus, learner, tmp_path
):
    """A server may lose what it acknowledged, and an actor's message may be one that nobody understands."""
    async with serving(bus, tmp_path) as storage:
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        tasks, inbox = bus.topology.stream("TASKS"), Inbox(bus, "TASKS", "rollout")
        held = await inbox.take(1)  # somebody works on it
        for sequence in (2, 3):
            await bus.js.delete_msg(tasks, sequence)
        await has(bus, "TASKS", 4)
        assert sorted([lease.lease_id for lease in await leases(bus)]) == [0, 1, 2, 3]
        await send_groups(bus, [0])
        await held[0].ack()
        await stored(storage, 1)
        await bus.js.purge_stream(tasks)
        await has(bus, "TASKS", 3)
        assert sorted([lease.lease_id for lease in await leases(bus)]) == [1, 2, 3]
        assert all(lease.republished for lease in await leases(bus))
        assert isinstance(await learner.ask(1), Waiting)  # several polls later
        assert await messages(bus, "TASKS") == 3
        await rolled_out(bus, storage)
        assert await learner.batch(1) == [0, 1]
        assert storage.ledger.account().balanced()


async def test_leases_are_not_lost_while_their_trajectories_or_rejections_wait_to_be_read(
    bus, learner, tmp_path
):
    async with serving(bus, tmp_path):
        await learner.publish(0)
        await has(bus, "TASKS", 4)
    await bus.js.purge_stream(bus.topology.stream("TASKS"))
    await send_groups(bus, [1])
    inbox = Inbox(bus, "TRAJECTORIES", "shard-1")
    [held] = await inbox.take(1)  # so that the shard does not get it yet
    async with serving(bus, tmp_path):
        assert isinstance(await learner.ask(1), Waiting)  # several polls later
        assert await messages(bus, "TASKS") == 0
        await held.nak()
        await has(bus, "TASKS", 3)
    assert sorted([lease.lease_id for lease in await leases(bus)]) == [0, 2, 3]


async def test_groups_completed_while_the_dispatcher_was_down_are_found(bus, learner, tmp_path):
    async with serving(bus, tmp_path):
        await learner.publish(0)
        await has(bus, "TASKS", 4)
    with opened(bus, tmp_path) as storage:
        async with running(storage.shards[0].run):
            await send_groups(bus, [0, 2])
            await until(lambda: storage.stores[0].completed == [0, 2])
        async with running(lambda stop: storage.run(stop, reissue=False)):
            assert await learner.batch(1) == [0, 2]


async def test_dispatcher_survives_an_outage_of_the_bus(server, bus, learner, tmp_path):
    async with serving(bus, tmp_path) as storage:
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        await server.kill()
        await server.start()
        await until(lambda: bus.client.is_connected)
        await rolled_out(bus, storage)
        assert await learner.batch(1) == [0, 1]


async def test_replay_that_lost_groups_stops_the_dispatcher(bus, tmp_path):
    with opened(bus, tmp_path) as storage:
        storage.ledger.set_fact("shard_1", "5")
        async with running(storage.shards[1].run):
            with pytest.raises(ExceptionGroup) as failure:
                await storage.dispatcher.run(asyncio.Event(), reissue=False)
    assert failure.group_contains(LostDataError, match="shard 1 holds 0 complete groups, .* has seen 5")


async def test_disk_that_refuses_stops_the_dispatcher(bus, learner, tmp_path):
    with opened(bus, tmp_path) as storage:
        task = asyncio.create_task(storage.run(asyncio.Event(), reissue=False))
        await learner.ask(1)
        with refusing_disk():
            storage.ledger.issue(1, policy_version=0)
            with pytest.raises(BusError, match="ledger cannot be written"):
                await learner.commit(0)
            with pytest.raises(ExceptionGroup) as failure:
                await task
        assert failure.group_contains(StorageError, match="ledger cannot be written")
