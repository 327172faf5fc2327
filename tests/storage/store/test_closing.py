"""Groups that are given to a step though siblings are missing: durable, counted, and never more than that."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from bus.errors import StorageError
from storage.settings.admission import AdmissionConfig
from storage.shard.group_requests import FEWEST
from storage.store.complete_groups import in_order
from storage.store.replay import ReplayStore
from tests.factories import make_trajectory
from tests.storage.serving import LearnerStandIn, has, refusing_disk, send, serving, until


def siblings(lease_id: int, *samples: int, group_size: int = 3):
    return [make_trajectory(lease_id, sample, group_size=group_size) for sample in samples]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ReplayStore]:
    opened = ReplayStore.open(tmp_path)
    yield opened
    opened.close()


# --- in a shard ---


def test_a_group_closed_short_is_read_with_what_it_has_and_takes_no_more(store):
    store.append(siblings(4, 0, 2))
    with pytest.raises(StorageError, match="2 of its 3 trajectories"):
        store.read([4])
    assert store.close_short([4], fewest=FEWEST) == [4]
    assert [t.sample for t in store.read([4])] == [0, 2]
    assert store.append(siblings(4, 1)) == []
    assert store.append(siblings(4, 0, 2)) == []  # redelivered, as if it had been whole
    assert (store.completed, store.trajectories, store.closed_short, store.late_siblings) == ([4], 2, 1, 1)


def test_only_groups_with_enough_siblings_are_closed_and_whole_ones_stay_as_they_are(store):
    store.append([*siblings(0, 0), *siblings(2, 0, 1), *siblings(4, 0, 1, 2)])
    assert store.close_short([0, 2, 4, 6], fewest=FEWEST) == [2, 4]
    assert store.close_short([0, 2, 4, 6], fewest=FEWEST) == [2, 4]
    assert (store.completed, store.closed_short) == ([4, 2], 1)
    assert store.append(siblings(0, 1, 2)) == [0]


def test_the_order_of_completion_is_the_same_after_a_restart_however_it_came_about(tmp_path):
    """The dispatcher remembers how far it has read that list."""
    store = ReplayStore.open(tmp_path)
    store.append([*siblings(0, 0, 1), *siblings(2, 0, 1), *siblings(4, 0, 1), *siblings(6, 0, 1, 2)])
    store.close_short([4], fewest=FEWEST)
    store.append(siblings(2, 2))
    store.close_short([0], fewest=FEWEST)
    store.append([*siblings(4, 2), *siblings(8, 0, 1, 2)])
    assert store.completed == [6, 4, 2, 0, 8]
    reader = ReplayStore.open(tmp_path, writable=False)
    store.close()
    reopened = ReplayStore.open(tmp_path)
    (tmp_path / ".index").unlink()
    rebuilt = ReplayStore.open(tmp_path, writable=False)
    for found in (reader, reopened, rebuilt):
        assert found.completed == [6, 4, 2, 0, 8]
        assert [t.sample for t in found.read([4])] == [0, 1]
        found.close()


def test_a_reader_finds_a_group_that_was_closed_since_it_looked(store):
    store.append(siblings(0, 0, 1))
    reader = ReplayStore.open(store.directory, writable=False)
    store.close_short([0], fewest=FEWEST)
    assert len(reader.read([0])) == 2
    reader.close()


def test_nothing_is_closed_when_the_disk_refuses(store):
    store.append(siblings(0, 0, 1))
    with refusing_disk(), pytest.raises(StorageError, match=r"\.groups\.sqlite cannot be used"):
        store.close_short([0], fewest=FEWEST)
    assert store.completed == []
    assert store.append(siblings(0, 2)) == [0]


def test_groups_are_put_where_they_were():
    assert in_order([1, 2, 3], {7: 0, 8: 2, 9: 3}) == [7, 1, 8, 9, 2, 3]
    assert in_order([], {7: 0}) == [7]


# --- on the bus ---


@pytest.mark.nats
@pytest.mark.usefixtures("quick")
async def test_a_step_trains_on_what_is_stored_when_patience_ends(bus, tmp_path):
    learner = LearnerStandIn(bus)
    admission = AdmissionConfig(
        groups_per_step=3, samples_per_prompt=3, max_staleness=0, incomplete="close_short", patience_s=1.0
    )
    async with serving(bus, tmp_path, admission) as storage:
        await learner.publish(0)
        await has(bus, "TASKS", 3)
        await send(bus, *siblings(0, 0, 1, 2))
        await send(bus, *siblings(1, 0, 2))
        await send(bus, *siblings(2, 1))  # one alone is not a group
        await until(lambda: sum(store.trajectories for store in storage.stores) == 6)
        asking = asyncio.create_task(learner.batch(1))
        await has(bus, "TASKS", 4)  # in the place of 2
        await send(bus, *siblings(1, 1))
        await send(bus, *siblings(3, 0, 1, 2))
        assert await asking == [0, 1, 3]
        assert storage.ledger.reasons == {"incomplete": 1}
        assert storage.ledger.account().balanced()
        await until(lambda: storage.stores[1].late_siblings == 1)
    async with serving(bus, tmp_path, admission) as storage:
        assert await learner.batch(1) == [0, 1, 3]
        assert [t.sample for t in storage.stores[1].read([1])] == [0, 2]
        assert storage.stores[1].closed_short == 1


@pytest.mark.nats
@pytest.mark.usefixtures("quick")
async def test_whole_groups_are_waited_for_until_patience_ends(bus, tmp_path):
    learner = LearnerStandIn(bus)
    admission = AdmissionConfig(
        groups_per_step=1, samples_per_prompt=2, max_staleness=0, incomplete="close_short", patience_s=60
    )
    async with serving(bus, tmp_path, admission) as storage:
        await learner.publish(0)
        await has(bus, "TASKS", 1)
        await send(bus, *siblings(0, 0, 1))
        assert (await learner.ask(1)).reason == "0 of 1 groups are stored, 1 rolling out"
        assert storage.stores[0].closed_short == 0
        await send(bus, *siblings(0, 2))
        assert await learner.batch(1) == [0]
