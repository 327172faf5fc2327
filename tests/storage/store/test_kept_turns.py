"""Turns of rollouts that have not ended, in one store on a real disk."""

import sqlite3
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest

from bus.codec import encode
from bus.errors import StorageError
from storage.store.replay import ReplayStore
from tests.factories import make_trajectory, make_turn
from tests.storage.serving import refusing_disk


@contextmanager
def opened(directory):
    with closing(ReplayStore.open(directory / "shard_00")) as store:
        yield store


def kept(store: ReplayStore, lease_id: int) -> list[tuple[int, int]]:
    return [(turn.rollout, turn.number) for turn in store.turns.of(lease_id)]


def test_turns_outlive_the_process_that_stored_them_bit_for_bit(tmp_path):
    turns = [make_turn(4, 1, 0), make_turn(4, 1, 1), make_turn(4, 0, 0), make_turn(5, 0, 0)]
    with opened(tmp_path) as store:
        store.turns.keep(turns)
    with opened(tmp_path) as store:
        assert (store.turns.number_of(4), store.turns.number_of(5), store.turns.number_of(6)) == (3, 1, 0)
        assert [encode(turn) for turn in store.turns.of(4)] == [encode(turns[n]) for n in (2, 0, 1)]
        assert store.turns.of(6) == []


def test_a_turn_that_was_gone_on_with_takes_the_place_of_its_beginning(tmp_path):
    with opened(tmp_path) as store:
        store.turns.keep([replace(make_turn(4, 0, 0, tokens=2), finish_reason="abort")])
        store.turns.keep([make_turn(4, 0, 0, tokens=6)])
        [turn] = store.turns.of(4)
        assert (turn.finish_reason, len(turn.token_ids)) == ("stop", 6)
        assert store.turns.number_of(4) == 1


def test_turns_go_with_the_last_trajectory_of_their_group_and_come_too_late_afterwards(tmp_path):
    with opened(tmp_path) as store:
        store.turns.keep([make_turn(4, 0, 0), make_turn(4, 1, 0), make_turn(5, 0, 0)])
        store.append([make_trajectory(4, 0)])
        assert kept(store, 4) == [(0, 0), (1, 0)]
        store.append([make_trajectory(4, 1)])
        assert kept(store, 4) == []
        store.turns.keep([make_turn(4, 1, 1)])
        assert (kept(store, 4), kept(store, 5)) == ([], [(0, 0)])
        assert store.turns.counts == {"stored": 3, "completed": 2, "expired": 1}
    with opened(tmp_path) as store:
        assert (kept(store, 4), kept(store, 5)) == ([], [(0, 0)])


def test_turns_of_leases_that_gave_no_group_go_when_they_are_settled(tmp_path):
    with opened(tmp_path) as store:
        store.turns.keep([make_turn(n, 0, 0) for n in (0, 1, 2)])
        store.append([make_trajectory(3, sample) for sample in range(2)])
        assert store.settle(4, [1], seen=1)
        assert [kept(store, n) for n in (0, 1, 2)] == [[], [(0, 0)], []]
        assert store.turns.counts["expired"] == 2


def test_turns_of_leases_that_were_rejected_go_though_no_group_settles(tmp_path):
    with opened(tmp_path) as store:
        store.turns.keep([make_turn(n, 0, 0) for n in range(4)])
        assert not store.settle(3, [1], seen=0)
        assert [kept(store, n) for n in range(4)] == [[], [(0, 0)], [], [(0, 0)]]
        assert not store.settle(4, [], seen=0)
        assert not store.turns
        assert store.turns.counts == {"stored": 4, "expired": 4}
    with opened(tmp_path) as store:
        assert not store.turns


def test_turns_of_a_group_that_is_closed_short_are_of_no_use(tmp_path):
    with opened(tmp_path) as store:
        store.append([make_trajectory(4, sample, group_size=3) for sample in range(2)])
        store.turns.keep([make_turn(4, 2, 0)])
        assert store.close_short([4], fewest=2) == [4]
        assert kept(store, 4) == []
        assert store.turns.counts["expired"] == 1


def test_a_disk_that_refuses_leaves_what_was_kept(tmp_path):
    with opened(tmp_path) as store:
        store.turns.keep([make_turn(4, 0, 0)])
        with refusing_disk(), pytest.raises(StorageError):
            store.turns.keep([make_turn(4, 0, n, tokens=50_000) for n in range(1, 9)])
        assert kept(store, 4) == [(0, 0)]
        assert store.turns.counts == {"stored": 1, "expired": 0}


def test_groups_become_complete_though_the_disk_refuses_to_remove_their_turns(tmp_path):
    with opened(tmp_path) as store:
        store.turns.keep([make_turn(4, 0, 0), make_turn(5, 0, 0)])
        store.append([make_trajectory(5, 0, group_size=3)])
        with no_turn_removed(tmp_path):
            assert store.append([make_trajectory(4, 0), make_trajectory(4, 1)]) == [4]
            assert store.close_short([5], fewest=1) == [5]
            assert store.settle(6, [4], seen=1)
        assert (kept(store, 4), kept(store, 5)) == ([(0, 0)], [(0, 0)])
        store.settle(6, [], seen=2)
        assert not store.turns
        assert store.turns.counts == {"stored": 2, "expired": 2}


@contextmanager
def no_turn_removed(directory):
    """The database refuses to remove turns, as on a disk that has become full."""
    with closing(sqlite3.connect(directory / "shard_00" / ".groups.sqlite")) as sql:
        sql.executescript(
            "CREATE TRIGGER refuse BEFORE DELETE ON turns BEGIN SELECT missing FROM nowhere; END"
        )
        yield
        sql.executescript("DROP TRIGGER refuse")


def test_a_database_of_a_build_that_kept_no_turns_is_read_and_written(tmp_path):
    with opened(tmp_path) as store:
        store.turns.keep([make_turn(4, 0, 0)])
    database = tmp_path / "shard_00" / ".groups.sqlite"
    with closing(sqlite3.connect(database)) as sql:
        sql.execute("DROP TABLE turns")
    with closing(ReplayStore.open(tmp_path / "shard_00", writable=False)) as reader:
        assert reader.turns.of(4) == []
    with opened(tmp_path) as store:
        store.turns.keep([make_turn(4, 0, 0)])
        assert kept(store, 4) == [(0, 0)]
