"""A shard on a real bus over a real store: what is acked is stored, what cannot be stored stops nothing."""

import asyncio
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from types import SimpleNamespace

import pytest

from bus.codec import decode, encode
from bus.errors import BusError, StorageError
from bus.messages import GroupRejected
from bus.requests import ReadRequest, StoredGroups, StoredRequest
from bus.server.nats_server import MAX_PAYLOAD
from bus.streams.publish import Publisher
from bus.trajectory import Trajectory, TrajectoryBatch
from storage.shard import server
from storage.store.replay import ReplayStore
from tests.factories import make_trajectory
from tests.storage.serving import (
    dead_letters,
    expect_redelivery_after,
    has,
    make_shard,
    refusing_disk,
    running,
    send,
    send_groups,
    until,
)

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]


@pytest.fixture
def store(tmp_path):
    with closing(ReplayStore.open(tmp_path / "replay")) as opened:
        yield opened


def group(lease_id: int, size: int = 2, tokens: int = 8) -> list[Trajectory]:
    return [make_trajectory(lease_id, sample, group_size=size, tokens=tokens) for sample in range(size)]


async def read(bus, *lease_ids: int) -> list[TrajectoryBatch]:
    request = ReadRequest(lease_ids=lease_ids)
    return await bus.request_many(bus.subject("rpc", "read", 0), request, TrajectoryBatch, timeout_s=20)


async def news(bus, after: int) -> StoredGroups:
    subject = bus.subject("rpc", "stored", 0)
    return await bus.request(subject, StoredRequest(after=after), StoredGroups, timeout_s=20)


@asynccontextmanager
async def shard_at_work(bus, store, *, issued: int = 1000):
    async with running(make_shard(bus, store, 0, issued=issued).run):
        await until(lambda: answers(bus))
        yield


async def answers(bus) -> bool:
    try:
        await news(bus, 0)
    except BusError:
        return False
    return True


# --- storing ---


async def test_siblings_in_separate_messages_become_one_group_in_order(bus, store):
    siblings = group(4, size=3)
    async with shard_at_work(bus, store):
        for sample in (2, 0, 1):
            await send(bus, siblings[sample])
        await until(lambda: store.completed == [4])
        [answer] = await read(bus, 4)
    assert [encode(t) for t in answer.trajectories] == [encode(t) for t in siblings]
    await has(bus, "TRAJECTORIES", 0)


async def test_completed_groups_are_announced_and_listed(bus, store):
    heard: list[StoredGroups] = []
    await bus.listen(bus.subject("notice", "stored"), StoredGroups, heard.append)
    async with shard_at_work(bus, store):
        await send_groups(bus, [0])
        await until(lambda: bool(heard))
        await send(bus, make_trajectory(2, 0))  # half a group is no news
        await send_groups(bus, [4])
        await until(lambda: len(heard) == 2)
        assert heard == [
            StoredGroups(shard=0, after=0, lease_ids=(0,), total=1, tokens=(16,)),
            StoredGroups(shard=0, after=1, lease_ids=(4,), total=2, tokens=(16,)),
        ]
        both = StoredGroups(shard=0, after=0, lease_ids=(0, 4), total=2, tokens=(16, 16))
        assert await news(bus, 0) == both
        assert await news(bus, 1) == StoredGroups(shard=0, after=1, lease_ids=(4,), total=2, tokens=(16,))
        assert await news(bus, 2) == StoredGroups(shard=0, after=2, lease_ids=(), total=2)


async def test_of_groups_that_a_slow_disk_takes_long_to_read_an_answer_has_those_that_were_read_in_time(
    bus, store, monkeypatch
):
    """Or else the dispatcher, which waits a second, would never hear of any."""
    now, read_store = 0.0, store.read

    def slowly(leases):
        nonlocal now
        now += 0.3
        return read_store(leases)

    monkeypatch.setattr(store, "read", slowly)
    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=lambda: now))
    store.append([trajectory for lease_id in range(4) for trajectory in group(lease_id)])
    shard = make_shard(bus, store, 0, issued=4)
    for after, found in ((0, (0, 1)), (2, (2, 3))):
        [answer] = await shard._on_stored(StoredRequest(after=after, computed_tokens=True))
        assert (answer.lease_ids, answer.tokens, answer.total) == (found, (16, 16), 4)
        assert len(answer.computed_tokens) == 2
    now = 10.0
    monkeypatch.setattr(server, "READING_S", 0.0)
    [answer] = await shard._on_stored(StoredRequest(after=0, rewards=True))
    assert (answer.lease_ids, len(answer.rewards)) == ((0,), 1)


async def test_crash_between_storing_and_acking_stores_nothing_twice(bus, tmp_path):
    class KilledAfterAppend(ReplayStore):
        def append(self, trajectories):
            super().append(trajectories)
            raise RuntimeError("killed")

    await expect_redelivery_after(bus, 0.2)
    await send_groups(bus, [0, 2])
    with closing(KilledAfterAppend.open(tmp_path / "replay")) as store:
        with pytest.raises(RuntimeError, match="killed"):
            await make_shard(bus, store, 0).run(asyncio.Event())
        stored = store.trajectories
    await has(bus, "TRAJECTORIES", 2)
    with closing(ReplayStore.open(tmp_path / "replay")) as store:
        assert store.trajectories == stored
        async with shard_at_work(bus, store):
            await has(bus, "TRAJECTORIES", 0)
            assert store.trajectories == 4
            assert sorted(store.completed) == [0, 2]
            assert len(await read(bus, 0, 2)) == 1


async def test_disk_that_refuses_stops_the_shard_and_keeps_the_messages(bus, store):
    await expect_redelivery_after(bus, 0.2)
    await send_groups(bus, [0])
    with refusing_disk(), pytest.raises(StorageError):
        await make_shard(bus, store, 0).run(asyncio.Event())
    await has(bus, "TRAJECTORIES", 1)
    async with shard_at_work(bus, store):
        await until(lambda: store.completed == [0])
    await has(bus, "DEAD", 0)


async def test_restarted_shard_continues_its_groups_and_its_list(bus, tmp_path):
    with closing(ReplayStore.open(tmp_path / "replay")) as store:
        async with shard_at_work(bus, store):
            await send_groups(bus, [2])
            await send(bus, make_trajectory(0, 0))
            await until(lambda: store.trajectories == 3)
    with closing(ReplayStore.open(tmp_path / "replay")) as store:
        async with shard_at_work(bus, store):
            assert (await news(bus, 0)).lease_ids == (2,)
            await send(bus, make_trajectory(0, 1))
            await until(lambda: store.completed == [2, 0])
            [answer] = await read(bus, 0, 2)
    assert [(t.lease_id, t.sample) for t in answer.trajectories] == [(0, 0), (0, 1), (2, 0), (2, 1)]


# --- what cannot be stored ---


async def refunds(bus, count: int) -> list[GroupRejected]:
    """The rejections published so far, once there are `count`."""
    await has(bus, "OUTCOMES", count)
    found = [await bus.js.get_msg(bus.topology.stream("OUTCOMES"), n + 1) for n in range(count)]
    return [decode(raw.data, GroupRejected) for raw in found]


async def test_sibling_of_another_group_size_is_set_aside_and_the_rest_of_the_batch_stored(bus, store):
    async with shard_at_work(bus, store):
        await send(bus, make_trajectory(0, 0, group_size=2))
        await until(lambda: store.trajectories == 1)
    await send_groups(bus, [2])
    await send(bus, make_trajectory(0, 1, group_size=3))
    await send_groups(bus, [4])
    async with shard_at_work(bus, store):  # finds all three in one batch
        await has(bus, "TRAJECTORIES", 0)
    assert store.completed == [2, 4]
    [letter] = await dead_letters(bus)
    assert "its group has 2 samples, it says 3" in letter.reason
    [refund] = await refunds(bus, 1)  # its group may never be completed
    assert (refund.lease_id, refund.reason) == (0, "set_aside")


async def test_message_whose_own_siblings_disagree_is_set_aside(bus, store):
    async with shard_at_work(bus, store):
        await send(bus, make_trajectory(0, 0, group_size=2), make_trajectory(0, 1, group_size=3))
        await send_groups(bus, [2])
        await until(lambda: store.completed == [2])
        await has(bus, "TRAJECTORIES", 0)
    assert store.trajectories == 2
    assert len(await dead_letters(bus)) == 1


async def test_group_that_belongs_to_another_shard_is_set_aside_and_refunded(bus, store):
    async with shard_at_work(bus, store):
        await send(bus, *group(3), shard=0)
        await has(bus, "DEAD", 1)
        await has(bus, "TRAJECTORIES", 0)
    assert store.trajectories == 0
    [letter] = await dead_letters(bus)
    assert "lease 3 belongs to shard 1, not 0" in letter.reason
    assert [refund.lease_id for refund in await refunds(bus, 1)] == [3]


async def test_group_that_does_not_decode_is_refunded_by_the_id_of_its_message(bus, store):
    """Its lease would be rolled out again under the same message id, which the bus drops as a duplicate."""
    poison = encode(TrajectoryBatch(trajectories=(replace(make_trajectory(0), reward=1e39),)))
    async with shard_at_work(bus, store, issued=10):
        for name in ("g00000000", "g00000002.1", "g00000003", "g00000010", "nobody's"):
            subject = bus.subject("trajectories", 0)
            await Publisher(bus).publish(subject, poison, message_id=name)
        await Publisher(bus, part_bytes=len(poison) // 2).publish(subject, poison, message_id="g00000004")
        await has(bus, "DEAD", 6)
        found = await refunds(bus, 3)
    assert {(refund.lease_id, refund.reason) for refund in found} == {
        (0, "set_aside"),
        (2, "set_aside"),
        (4, "set_aside"),
    }
    assert "beyond what float32 holds" in found[0].detail


async def test_group_of_a_lease_that_was_never_issued_is_set_aside(bus, store):
    """Stored, it would stand in the way of the lease that gets this number later."""
    async with shard_at_work(bus, store, issued=10):
        await send(bus, *group(10))
        await send(bus, replace(make_trajectory(0), lease_id=-2), shard=0)
        await has(bus, "DEAD", 2)
        await has(bus, "TRAJECTORIES", 0)
    assert store.trajectories == 0
    assert ["never issued" in letter.reason for letter in await dead_letters(bus)] == [True, True]


async def test_bytes_that_are_no_trajectory_are_set_aside(bus, store):
    async with shard_at_work(bus, store):
        await bus.js.publish(bus.subject("trajectories", 0), b"garbage")
        await send_groups(bus, [0])
        await until(lambda: store.completed == [0])
        await has(bus, "TRAJECTORIES", 0)
    assert [letter.data for letter in await dead_letters(bus)] == [b"garbage"]


# --- reading ---


async def test_large_answer_comes_in_several_messages(bus, store):
    groups = [group(lease_id, tokens=30_000) for lease_id in (0, 2, 4)]
    store.append([trajectory for siblings in groups for trajectory in siblings])
    async with shard_at_work(bus, store):
        answers = await read(bus, 4, 0, 2)
    assert len(answers) > 1
    assert sum(len(encode(answer)) for answer in answers) > 1 << 20
    assert max(len(encode(answer)) for answer in answers) < MAX_PAYLOAD / 2
    received = [encode(t) for answer in answers for t in answer.trajectories]
    assert received == [encode(t) for n in (2, 0, 1) for t in groups[n]]


async def test_read_of_a_group_that_is_not_complete_is_refused_with_the_reason(bus, store):
    store.append([make_trajectory(0, 0)])
    async with shard_at_work(bus, store):
        with pytest.raises(BusError, match="lease 0 cannot be read: 1 of its 2 trajectories are stored"):
            await read(bus, 0)
        with pytest.raises(BusError, match="lease 6 cannot be read: nothing of it is stored"):
            await read(bus, 6)
