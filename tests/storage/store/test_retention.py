"""Shards at work keep what may still be trained on, and let go of the rest."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from bus.requests import Unsettled, UnsettledRequest
from storage.store import layout, retention
from storage.store.archive import restore
from storage.store.retention import Retention, keep_house
from tests.factories import make_turn
from tests.storage.serving import LearnerStandIn, running, send_groups, send_rejections, serving, until

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]
ALL = Retention(retain_bytes=0)


@pytest.fixture(autouse=True)
def quick_housekeeping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "PERIOD_S", 0.05)


@asynccontextmanager
async def housekeeping(bus, storage, how: Retention):
    async with running(lambda stop: keep_house(bus, storage.stores[0], how, stop, shard=0)):
        yield


async def unsettled(bus) -> list[int]:
    subject = bus.subject("rpc", "unsettled")
    answer = await bus.request(subject, UnsettledRequest(), Unsettled, timeout_s=20)
    return sorted(answer.lease_ids)


async def test_only_rejected_and_committed_groups_are_settled(bus, tmp_path):
    learner = LearnerStandIn(bus)
    async with serving(bus, tmp_path) as storage:
        await learner.publish(0)
        await until(lambda: storage.ledger.next_id == 4)
        await send_groups(bus, [0, 1, 2])
        await send_rejections(bus, [3])
        await until(lambda: set(storage.ledger.stored) == {0, 1, 2})  # each shard has its own pace
        await until(lambda: 3 not in storage.ledger.rolling_out)
        assert await learner.batch(1) == [0, 1]
        assert not {3} & set(await unsettled(bus))
        assert {0, 1, 2} <= set(await unsettled(bus))
        await learner.commit(1)
        assert {0, 1, 3}.isdisjoint(await unsettled(bus))
        assert 2 in await unsettled(bus)
    async with serving(bus, tmp_path) as storage:  # known across a restart
        await until(lambda: bool(storage.dispatcher.policy))
        assert {0, 1, 3}.isdisjoint(await unsettled(bus))
        await learner.resume(0)  # a checkpoint before the step
        assert {0, 1} <= set(await unsettled(bus))


async def test_committed_groups_go_to_the_archive_and_others_stay(bus, tmp_path):
    learner = LearnerStandIn(bus)
    how = Retention(retain_bytes=0, archive=str(tmp_path / "archive"))
    async with serving(bus, tmp_path) as storage:
        store = storage.stores[0]
        async with housekeeping(bus, storage, how):
            await learner.publish(0)
            await until(lambda: storage.ledger.next_id == 4)
            await send_groups(bus, [0, 1])
            assert await learner.batch(1) == [0, 1]
            await send_groups(bus, [2])
            await until(lambda: store.completed == [0, 2])
            await asyncio.sleep(0.3)
            assert not any(entry.retired for entry in store.entries)
            await learner.commit(1)
            await until(lambda: store.entries[0].retired)
            await asyncio.sleep(0.2)
            assert [entry.retired for entry in store.entries] == [True, False]
            assert len(store.read([2])) == 2
    assert restore(tmp_path / "0", how.archive) == ["segment_00000000"]


async def test_age_is_a_limit_of_its_own(bus, tmp_path):
    learner = LearnerStandIn(bus)
    async with serving(bus, tmp_path) as storage:
        store = storage.stores[0]
        await learner.publish(0)
        await until(lambda: storage.ledger.next_id == 4)
        await send_groups(bus, [0, 1])
        assert await learner.batch(1) == [0, 1]
        await learner.commit(1)
        async with housekeeping(bus, storage, Retention(retain_age_s=3600)):
            await asyncio.sleep(0.2)
            assert not store.entries[0].retired
        async with housekeeping(bus, storage, Retention(retain_age_s=0.01)):
            await until(lambda: store.entries[0].retired)


async def test_turns_of_a_rejected_lease_go_before_anything_else_does(bus, tmp_path):
    learner = LearnerStandIn(bus)
    async with serving(bus, tmp_path) as storage:
        store = storage.stores[0]
        await learner.publish(0)
        await until(lambda: storage.ledger.next_id == 4)
        store.turns.keep([make_turn(0, 0, 0), make_turn(2, 0, 0)])
        await send_rejections(bus, [2])
        async with housekeeping(bus, storage, Retention()):
            await until(lambda: store.turns.number_of(2) == 0)
        assert store.turns.number_of(0) == 1  # it is rolling out


async def test_segments_are_merged_while_the_shard_stores(bus, tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "MERGE_SEGMENTS", 4)
    async with serving(bus, tmp_path) as storage:
        store = storage.stores[0]
        storage.ledger.issue(40, 0)
        async with housekeeping(bus, storage, Retention()):
            for lease_id in range(0, 40, 2):
                await send_groups(bus, [lease_id])
                await until(lambda lease=lease_id: lease in store.completed)
            await until(lambda: len(store.entries) < 8)
        assert len(store.read(store.completed)) == 40


async def test_a_dispatcher_that_does_not_answer_keeps_everything(bus, tmp_path):
    async with serving(bus, tmp_path) as storage:
        store = storage.stores[0]
        storage.ledger.issue(2, 0)
        await send_groups(bus, [0])
        await until(lambda: store.completed == [0])
    async with running(lambda stop: keep_house(bus, store, ALL, stop, shard=0)):
        await asyncio.sleep(0.2)
    assert not store.entries[0].retired
