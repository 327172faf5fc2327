"""Rewards that come apart from their trajectories, in one store on a real disk."""

import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bus.errors import SchemaError, StorageError
from bus.messages import RewardGiven, trajectory_name
from bus.trajectory import Trajectory
from storage.store.archive import restore
from storage.store.replay import ReplayStore
from tests.factories import make_trajectory
from tests.storage.serving import refusing_disk


def late(lease_id: int, *samples: int) -> list[Trajectory]:
    """Make two siblings without their rewards."""
    siblings = (make_trajectory(lease_id, sample, reward=0.0) for sample in samples or (0, 1))
    return [replace(t, reward_due=True) for t in siblings]


def scored(lease_id: int) -> list[Trajectory]:
    """A group of two that has its rewards."""
    return [make_trajectory(lease_id, sample) for sample in range(2)]


def reward(lease_id: int, sample: int, value: float = 0.5) -> RewardGiven:
    return RewardGiven(trajectory_id=trajectory_name(lease_id, sample), reward=value, source="judge")


def rewards_of(lease_id: int) -> list[RewardGiven]:
    return [reward(lease_id, 0, 0.25), reward(lease_id, 1, 0.75)]


@contextmanager
def opened(directory: Path) -> Iterator[ReplayStore]:
    with closing(ReplayStore.open(directory / "shard_00")) as store:
        yield store


def read(store: ReplayStore, *lease_ids: int) -> list[tuple[float, bool]]:
    return [(t.reward, t.reward_due) for t in store.read(lease_ids)]


def test_group_becomes_complete_with_its_last_reward(tmp_path):
    with opened(tmp_path) as store:
        assert store.append(late(4)) == []
        assert store.give([reward(4, 1, 0.75)]) == []
        with pytest.raises(StorageError, match=r"lease 4 cannot be read: the reward of g00000004\.0 is due"):
            store.read([4])
        assert [t.reward_due for t in store.trajectories_of(4)] == [True, False]
        assert store.full([4, 5]) == [4]
        assert store.give([reward(4, 0, 0.25)]) == [4]
        assert store.completed == [4]
        assert read(store, 4) == [(0.25, False), (0.75, False)]
        assert {t.reward_source for t in store.read([4])} == {"judge"}


def test_who_gave_a_reward_is_kept_with_its_trajectory(tmp_path):
    posted = [replace(t, reward_source=f"program 10.0.0.{t.sample}") for t in scored(4)]
    with opened(tmp_path) as store:
        store.append(posted)
    with opened(tmp_path) as store:
        assert [t.reward_source for t in store.read([4])] == ["program 10.0.0.0", "program 10.0.0.1"]


def test_reward_may_come_before_its_trajectory(tmp_path):
    with opened(tmp_path) as store:
        assert store.give(rewards_of(4)) == []
    with opened(tmp_path) as store:
        assert store.append(late(4, 1)) == []
        assert store.append(late(4, 0)) == [4]
        assert read(store, 4) == [(0.25, False), (0.75, False)]


def test_only_the_samples_whose_reward_is_due_wait_for_one(tmp_path):
    with opened(tmp_path) as store:
        assert store.append([make_trajectory(4, 0, reward=1.0), *late(4, 1)]) == []
        assert store.give([reward(4, 1, 0.75)]) == [4]
        assert read(store, 4) == [(1.0, False), (0.75, False)]


def test_the_first_reward_counts_and_a_second_is_counted(tmp_path):
    with opened(tmp_path) as store:
        store.append(late(4))
        store.give([reward(4, 0, 0.25), reward(4, 0, 0.25), reward(4, 0, 0.9)])
        assert store.give(rewards_of(4)) == [4]
        assert store.give([*rewards_of(4), reward(4, 1, 0.9)]) == []
        assert store.rewards == {"taken": 2, "again": 4, "differing": 2}
        assert read(store, 4) == [(0.25, False), (0.75, False)]
    with opened(tmp_path) as store:
        store.give([reward(4, 1, 0.9)])
        assert store.rewards == {"differing": 1}
        assert read(store, 4) == [(0.25, False), (0.75, False)]


def test_reward_for_what_cannot_have_one_is_refused_and_the_others_of_its_batch_are_not_kept(tmp_path):
    with opened(tmp_path) as store:
        store.append(scored(4))
        store.append(late(6, 0))
        with pytest.raises(SchemaError, match=r"g00000004\.1: it was stored with its reward") as refused:
            store.give([reward(6, 0), reward(4, 1)])
        assert refused.value.kind == "reward"
        with pytest.raises(SchemaError, match=r"g00000006\.2: its group has 2 samples"):
            store.give([reward(6, 0), reward(6, 2)])
        assert store.rewards == {}


def test_rewards_and_the_order_of_completion_survive_a_restart(tmp_path):
    with opened(tmp_path) as store:
        store.append(late(0))
        store.append(scored(2))
        store.append(late(4))
        store.give(rewards_of(4))
        store.append(scored(6))
        store.give([reward(0, 0)])
    with opened(tmp_path) as store:
        assert store.completed == [2, 4, 6]
        assert store.give([reward(0, 1)]) == [0]
        store.append(scored(8))
    with opened(tmp_path) as store:
        assert store.completed == [2, 4, 6, 0, 8]
        assert [r for r, _ in read(store, 4, 0)] == [0.25, 0.75, 0.5, 0.5]


def test_a_sample_noted_as_due_whose_segment_was_never_written_may_come_with_its_reward(tmp_path):
    with opened(tmp_path) as store:
        store.append(scored(2))
        with pytest.raises(StorageError), refusing_segments(store):
            store.append(late(4))
    with opened(tmp_path) as store:
        assert store.completed == [2]
        assert store.append([make_trajectory(4, 0, reward=1.0), *late(4, 1)]) == []
        assert store.give([reward(4, 1)]) == [4]
        assert read(store, 4) == [(1.0, False), (0.5, False)]


@contextmanager
def refusing_segments(store: ReplayStore) -> Iterator[None]:
    """Where the next segment would be, something is in its way."""
    (store.directory / f"segment_{len(store.entries):08d}").mkdir()
    try:
        yield
    finally:
        (store.directory / f"segment_{len(store.entries):08d}").rmdir()


def test_group_whose_place_a_crash_prevented_gets_one_at_the_next_start(tmp_path):
    with opened(tmp_path) as store:
        store.give(rewards_of(4))
        store.append(late(6))
        store._held.groups._complete = None  # the crash: it comes after the segment, before the place
        with pytest.raises(TypeError):
            store.append([*late(4), *scored(2)])
    for _ in range(2):
        with opened(tmp_path) as store:
            assert store.completed == [2, 4]


def test_full_disk_keeps_no_reward_and_the_next_attempt_does(tmp_path):
    with opened(tmp_path) as store:
        store.append(late(4))
        with refusing_disk(), pytest.raises(StorageError, match=r"\.groups\.sqlite cannot be used"):
            store.give(rewards_of(4))
        assert store.completed == []
        assert store.give(rewards_of(4)) == [4]


def test_without_its_rewards_file_a_group_is_refused_rather_than_trained_on_without_them(tmp_path):
    with opened(tmp_path) as store:
        store.append(late(4))
        store.give(rewards_of(4))
    (tmp_path / "shard_00/.groups.sqlite").unlink()
    with opened(tmp_path) as store, pytest.raises(StorageError, match="is due"):
        store.read([4])


def test_file_that_is_no_rewards_database_is_named(tmp_path):
    with opened(tmp_path) as store:
        store.append(late(4))
    (tmp_path / "shard_00/.groups.sqlite").write_bytes(b"x" * 4096)
    with pytest.raises(StorageError, match=r"\.groups\.sqlite cannot be used"):
        ReplayStore.open(tmp_path / "shard_00")


def test_run_without_late_rewards_has_no_file_for_them(tmp_path):
    with opened(tmp_path) as store:
        store.append(scored(4))
    assert not (tmp_path / "shard_00/.groups.sqlite").exists()


def test_reader_beside_the_writer_sees_rewards_as_they_come(tmp_path):
    with opened(tmp_path) as store, closing(ReplayStore.open(store.directory, writable=False)) as reader:
        store.append(late(4))
        with pytest.raises(StorageError, match="is due"):
            reader.read([4])
        store.give(rewards_of(4))
        assert read(reader, 4) == [(0.25, False), (0.75, False)]


def test_merged_archived_and_restored_groups_keep_their_late_rewards(tmp_path):
    with opened(tmp_path) as store:
        for lease_id in range(0, 100, 2):
            store.append(late(lease_id))
        for lease_id in range(98, -1, -2):
            store.give(rewards_of(lease_id))
        order = list(store.completed)
        assert store.compact()
        assert read(store, 0) == [(0.25, False), (0.75, False)]
        store.retire(store.entries[0], str(tmp_path / "archive"))
        with pytest.raises(StorageError, match="was retired"):
            store.read([0])
    restore(tmp_path / "shard_00", str(tmp_path / "archive"))
    with opened(tmp_path) as store:
        assert store.completed == order == list(range(98, -1, -2))
        assert read(store, 0) == [(0.25, False), (0.75, False)]


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize("seed", range(3))
def test_whatever_the_order_of_events_and_restarts_the_list_only_grows(tmp_path, seed):
    """The ledger counts how far in the list it has read: nothing may come before that place later."""
    rng = random.Random(seed)
    events: list[Trajectory | RewardGiven] = []
    for lease_id in range(8):
        events += late(lease_id, *((0, 1) if lease_id % 4 else (0,)))
        events += [
            reward(lease_id, sample, lease_id + sample / 2) for sample in range(2 if lease_id % 4 else 1)
        ]
        events += [] if lease_id % 4 else [make_trajectory(lease_id, 1, reward=lease_id + 0.5)]
    events += rng.sample(events, 10)  # redelivered
    rng.shuffle(events)
    seen: list[int] = []
    while events:
        with opened(tmp_path) as store:
            assert store.completed == seen
            for event in [events.pop() for _ in range(min(len(events), rng.randrange(1, 9)))]:
                if isinstance(event, RewardGiven):
                    seen += store.give([event])
                else:
                    seen += store.append([event])
                assert store.completed == seen
    with opened(tmp_path) as store:
        assert sorted(store.completed) == list(range(8))
        assert [r for r, _ in read(store, *range(8))] == [n + s / 2 for n in range(8) for s in range(2)]
