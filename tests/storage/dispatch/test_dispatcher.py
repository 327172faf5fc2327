"""The dispatcher on a real bus, with real shards: what is issued, refunded and dropped."""

import asyncio

import pytest

from bus.connection import Bus
from bus.requests import Waiting
from storage.prompts.order import PromptOrder
from storage.settings.admission import AdmissionConfig
from tests.factories import make_trajectory
from tests.storage.dispatch.lease_states import rolled_out
from tests.storage.serving import (
    PROMPTS,
    has,
    leases,
    manifest,
    send,
    send_groups,
    send_rejections,
    serving,
    until,
)

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]


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


async def test_group_that_never_completes_is_dropped_and_another_issued(bus, learner, tmp_path):
    admission = AdmissionConfig(
        groups_per_step=2, samples_per_prompt=2, max_staleness=0, incomplete="drop", patience_s=3.0
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


# --- restarts ---
