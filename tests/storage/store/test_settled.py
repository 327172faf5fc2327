"""Groups that are settled leave the memory of a shard, and nothing that it says or does changes by that."""

import json
import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from test_replay import as_bytes, group, trajectory

from bus.errors import LostDataError, StorageError
from bus.messages import RewardGiven, trajectory_name
from bus.trajectory import Trajectory
from storage.store import layout, retention
from storage.store.archive import restore
from storage.store.loading import INDEX_FILE
from storage.store.replay import ReplayStore
from storage.store.retention import Retention, keep_house
from storage.store.settled import FILE
from tests.factories import make_trajectory
from tests.storage.serving import LearnerStandIn, running, send_groups, serving, until


@pytest.fixture
def merge_four(monkeypatch):
    monkeypatch.setattr(layout, "MERGE_SEGMENTS", 4)


@pytest.fixture
def no_fsync(monkeypatch):
    """No power fails here."""
    monkeypatch.setattr("storage.disk.atomic_files.os.fsync", lambda descriptor: None)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))


def due(lease_id: int) -> Trajectory:
    """A group of one whose reward comes later."""
    return replace(make_trajectory(lease_id, 0, group_size=1), reward=0.0, reward_due=True)


def crashed(store: ReplayStore) -> None:
    """Let go of the files as death does: no index is written."""
    store._release()


# --- what is forgotten is as it was ---


@pytest.mark.parametrize("reopened", ["not", "closed", "crashed", "without_index"])
def test_settled_groups_are_read_as_before_and_stored_no_more(tmp_path, reopened):
    store = ReplayStore.open(tmp_path)
    for lease in range(8):
        store.append(group(lease))
    store.append(group(8)[:1])
    assert store.settle(9, [5, 8], seen=8)
    assert store.rows_in_memory == 3
    if reopened == "closed":
        store.close()
    elif reopened != "not":
        crashed(store)
    if reopened == "without_index":
        (tmp_path / INDEX_FILE).unlink(missing_ok=True)
    if reopened != "not":
        store = ReplayStore.open(tmp_path)
    with closing(store):
        assert store.rows_in_memory == 3
        assert as_bytes(store.read([6, 0, 5])) == as_bytes([*group(6), *group(0), *group(5)])
        assert [row for _, row in store.locate([2])] == [0, 1]
        assert as_bytes(store.trajectories_of(3)) == as_bytes(group(3))
        assert store.full([3, 5, 8, 9]) == [3, 5]
        assert store.append([*group(0), *group(5), *group(6)]) == []
        assert (store.trajectories, store.completions, store.youngest) == (17, 8, 7)
        assert sorted(store.completed) == list(range(8))
        assert store.append([*group(9), group(8)[1]]) == [9, 8]
        assert store.completed_after(8, 99) == [9, 8]


def test_what_comes_late_for_a_settled_group_is_refused_though_nothing_of_it_was_stored(tmp_path):
    with closing(ReplayStore.open(tmp_path)) as store:
        store.append([*group(0), *group(2)[:1]])
        store.settle(4, [3], seen=1)
        assert store.append([*group(1), *group(2), *group(3), *group(4)]) == [3, 4]  # 1 and 2 were rejected
        assert store.completed == [0, 3, 4]
        with pytest.raises(StorageError, match="1 of its 2 trajectories are stored"):
            store.read([2])
        with pytest.raises(StorageError, match="lease 1 cannot be read: nothing of it is stored"):
            store.read([1])


def test_a_group_that_a_resumed_learner_is_given_again_stays_readable(tmp_path):
    with closing(ReplayStore.open(tmp_path)) as store:
        for lease in range(4):
            store.append(group(lease))
        store.settle(2, [], seen=2)
        store.settle(3, [0], seen=3)  # 0 was trained on after the checkpoint that the learner went back to
        store.settle(4, [0, 3], seen=4)
        assert store.rows_in_memory == 2
        assert as_bytes(store.read([0, 3])) == as_bytes([*group(0), *group(3)])
        assert store.append(group(0)) == []
        store.append(group(4)[:1])
        store.settle(5, [3, 4], seen=4)
        store.settle(2, [], seen=4)  # an answer that comes late
        assert store.append(group(4)) == [4]
    with closing(ReplayStore.open(tmp_path)) as store:
        assert as_bytes(store.read([2, 0])) == as_bytes([*group(2), *group(0)])


def test_nothing_is_forgotten_when_the_disk_refuses(tmp_path):
    with closing(ReplayStore.open(tmp_path)) as store:
        store.append(group(0))
        (tmp_path / FILE).mkdir()
        with pytest.raises(StorageError, match="cannot write"):
            store.settle(1, [], seen=1)
        assert store.rows_in_memory == 2
        (tmp_path / FILE).rmdir()
        assert store.settle(1, [], seen=1)
        assert not store.settle(1, [], seen=1)


def test_groups_that_the_dispatcher_has_not_seen_keep_their_place(tmp_path):
    with closing(ReplayStore.open(tmp_path)) as store:
        for lease in (3, 0, 2, 1):
            store.append(group(lease))
        store.settle(4, [], seen=2)
        assert store.completed_after(2, 9) == [2, 1]
        with pytest.raises(StorageError, match=r"has seen 1 complete groups, .* noted 2"):
            store.completed_after(1, 9)
    with closing(ReplayStore.open(tmp_path)) as store:
        assert store.completed_after(2, 9) == [2, 1]
        assert store.completed_after(3, 9) == [1]
        assert store.completions == 4


def test_a_reader_finds_what_the_writer_has_forgotten(tmp_path, merge_four):
    with closing(ReplayStore.open(tmp_path)) as store:
        store.append(group(0))
        with closing(ReplayStore.open(tmp_path, writable=False)) as reader:
            for lease in range(1, 9):
                store.append(group(lease))
            store.settle(9, [], seen=9)
            assert store.compact()
            assert as_bytes(reader.read([7, 1])) == as_bytes([*group(7), *group(1)])
            assert sorted(reader.completed) == list(range(9))


def test_closed_groups_stay_readable_with_what_they_have(tmp_path):
    with closing(ReplayStore.open(tmp_path)) as store:
        store.append([trajectory(0, n, 3) for n in (0, 2)])
        store.close_short([0], fewest=2)
        store.append(group(1))
        store.settle(2, [], seen=2)
        assert store._held.groups._closed == set()
    with closing(ReplayStore.open(tmp_path)) as store:
        assert [t.sample for t in store.read([0])] == [0, 2]
        assert (sorted(store.completed), store.closed_short) == ([0, 1], 1)


def test_what_is_left_of_a_closed_group_is_not_taken_for_all_that_it_had(tmp_path):
    directory, archive = tmp_path / "shard_00", str(tmp_path / "archive")
    parts = [[trajectory(0, n, 5), trajectory(2, n, 5)] for n in (0, 1, 4)]
    with closing(ReplayStore.open(directory)) as store:
        store.append([*parts[0], *group(3)])
        store.append(parts[1])
        store.append([parts[2][0], trajectory(1, 0, 5), trajectory(1, 1, 5)])
        store.close_short([0, 1, 2], fewest=2)
        store.settle(4, [], seen=4)
        store.retire(store.entries[0], archive)
        assert store.completed == [1]
        assert [t.sample for t in store.read([1])] == [0, 1]  # it lay elsewhere, all of it
        for lease in (0, 2):
            with pytest.raises(LostDataError, match=f"what it held of the group of lease {lease} with it"):
                store.read([lease])
    restore(directory, archive)
    with closing(ReplayStore.open(directory)) as store:
        assert [t.sample for t in store.read([0, 2])] == [0, 1, 4, 0, 1]
        assert store.completed == [0, 1, 2, 3]


def test_a_torn_segment_takes_only_its_own_groups_with_it(tmp_path):
    with closing(ReplayStore.open(tmp_path)) as store:
        store.append([*group(0), *group(2)])
        store.append([*group(1), *group(3)])
        store.settle(4, [], seen=4)
        path = tmp_path / "segment_00000000" / "group.zip"
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        assert as_bytes(store.read([1])) == as_bytes(group(1))
        for lease in (0, 2):
            with pytest.raises(LostDataError, match="segment_00000000"):
                store.read([lease])
        with pytest.raises(LostDataError, match="segment_00000000"):
            store.trajectories_of(0)


def test_late_rewards_of_settled_groups_are_read_counted_and_kept_once(tmp_path):
    def reward(lease_id: int, value: float) -> RewardGiven:
        return RewardGiven(trajectory_id=trajectory_name(lease_id, 0), reward=value, source="judge")

    with closing(ReplayStore.open(tmp_path)) as store:
        store.append([due(lease) for lease in range(3)])
        store.give([reward(0, 0.25)])
        store.settle(2, [], seen=1)  # lease 1 was rejected while its reward was due
        rewards = store._held.groups.rewards
        assert (rewards._late, rewards._missing) == ({2}, {2: {0}})
        assert store.give([reward(0, 0.25), reward(0, 0.5), reward(1, 0.75)]) == []
        assert store.rewards == {"taken": 1, "again": 1, "differing": 1, "too_late": 1}
        with pytest.raises(StorageError, match="has rewards that lie apart from it"):
            store.locate([0])
        assert store.give([reward(2, 1.0)]) == [2]
    with closing(ReplayStore.open(tmp_path)) as store:
        assert [t.reward for t in store.read([0, 2])] == [0.25, 1.0]
        assert store.completed_after(1, 9) == [2]


# --- what is removed from the disk ---


def test_retired_neighbours_become_one_file_and_come_back_bit_for_bit(tmp_path, merge_four):
    directory, archive = tmp_path / "shard_00", str(tmp_path / "archive")
    with closing(ReplayStore.open(directory)) as store:
        for lease in range(9):
            store.append(group(lease))
        assert store.compact()
        store.settle(9, [7], seen=9)
        for n in (1, 3, 2):  # after 0-3: 4, 6, 5
            store.retire(store.entries[n], archive)
        assert names(directory)[0] == "retired_00000004-00000006"
        store.retire(store.entries[0], archive)
        store.retire(store.entries[2], archive)  # 8, beyond 7, which is needed
        expected = ["retired_00000000-00000006", "retired_00000008", "segment_00000007"]
        assert names(directory) == expected
        assert store.append([*group(0), *group(8)]) == []
        with pytest.raises(LostDataError, match="retired_00000000-00000006 was retired"):
            store.read([5])
        assert as_bytes(store.read([7])) == as_bytes(group(7))
        assert store.append(group(9)) == [9]
    for _ in range(2):  # with the index file, and without it
        with closing(ReplayStore.open(directory)) as store:
            assert (store.completions, store.trajectories, store.rows_in_memory) == (10, 20, 4)
            assert store.append([*group(0), *group(9)]) == []
            assert as_bytes(store.read([7, 9])) == as_bytes([*group(7), *group(9)])
        (directory / INDEX_FILE).unlink()
    assert restore(directory, archive) == [
        "segment_00000000-00000003", "segment_00000004", "segment_00000005", "segment_00000006",
        "segment_00000008",
    ]  # fmt: skip
    with closing(ReplayStore.open(directory)) as store:
        assert as_bytes(store.read(range(10))) == as_bytes(t for lease in range(10) for t in group(lease))
        assert sorted(store.completed) == list(range(10))


def test_a_crash_between_writing_what_is_left_and_removing_counts_nothing_twice(tmp_path, monkeypatch):
    store = ReplayStore.open(tmp_path)
    for lease in range(3):
        store.append(group(lease))
    store.settle(3, [], seen=3)
    store.retire(store.entries[0], None)
    with monkeypatch.context() as patch:
        patch.setattr("storage.store.replay.remove", lambda path: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store.retire(store.entries[1], None)
    crashed(store)
    assert names(tmp_path) == [
        "retired_00000000", "retired_00000000-00000001", "segment_00000001", "segment_00000002"
    ]  # fmt: skip
    with closing(ReplayStore.open(tmp_path)) as store:
        assert names(tmp_path) == ["retired_00000000-00000001", "segment_00000002"]
        assert (store.trajectories, store.completions) == (6, 3)
        assert as_bytes(store.read([2])) == as_bytes(group(2))


def test_what_a_later_neighbour_swallows_was_retired_before_it_was_settled(tmp_path):
    with closing(ReplayStore.open(tmp_path)) as store:
        for lease in range(3):
            store.append(group(lease))
        store.retire(store.entries[0], None)
        assert names(tmp_path)[0] == "retired_00000000"
        store.retire(store.entries[1], None)
        assert names(tmp_path)[:2] == ["retired_00000000", "retired_00000001"]
        store.settle(3, [], seen=3)
        store.retire(store.entries[2], None)
        assert names(tmp_path) == ["retired_00000000-00000002"]


def test_rewards_go_with_their_trajectories_unless_these_are_archived(tmp_path):
    def rewarded(archive: str | None) -> int:
        with closing(ReplayStore.open(tmp_path / f"s{archive is None}")) as store:
            store.append([due(0)])
            store.give([RewardGiven(trajectory_id=trajectory_name(0, 0), reward=0.5, source="judge")])
            store.settle(1, [], seen=1)
            store.retire(store.entries[0], archive)
            with store._held.groups._database.reading() as sql:
                [(count,)] = sql.execute("SELECT (SELECT COUNT(*) FROM due) + (SELECT COUNT(*) FROM rewards)")
            return count

    assert rewarded(None) == 0
    assert rewarded(str(tmp_path / "archive")) == 2


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        ("missing", r"\.settled is not of these segments"),
        ("garbled", r"\.settled is not JSON .* restore it with the segments"),
        ("lacking", r"\.settled cannot be used"),
        ("newer", r"\.settled is not of these segments, of which some are missing"),
    ],
)
def test_a_store_without_what_it_noted_is_refused(tmp_path, damage, complaint):
    with closing(ReplayStore.open(tmp_path)) as store:
        store.append(group(0))
        store.append(group(1))
        store.settle(2, [], seen=2)
        store.retire(store.entries[0], None)
    path = tmp_path / FILE
    noted = json.loads(path.read_text())
    if damage == "missing":
        path.unlink()
    else:
        del noted["order" if damage == "lacking" else "youngest"]
        path.write_text({"garbled": "{", "lacking": json.dumps(noted)}.get(damage, ""))
    if damage == "newer":
        path.write_text(json.dumps(noted | {"youngest": 1, "rows": 5}))
    (tmp_path / INDEX_FILE).unlink()
    with pytest.raises(LostDataError, match=complaint):
        ReplayStore.open(tmp_path)


# --- any order of events ---


def retire_settled(store: ReplayStore, settled: set[int], rng: random.Random) -> set[int]:
    """Retire one segment of settled groups alone, if there is any; return the leases that lose by it."""
    held = {entry: set(store.leases_of(entry).tolist()) for entry in store.entries if not entry.retired}
    ripe = [entry for entry, leases in held.items() if leases <= settled]
    if not ripe:
        return set()
    entry = rng.choice(ripe)
    store.retire(entry, None)
    return held[entry]


def reopened(directory: Path, rng: random.Random) -> ReplayStore:
    """Open a store again, now and then without its index file."""
    if rng.random() < 0.3:
        (directory / INDEX_FILE).unlink(missing_ok=True)
    return ReplayStore.open(directory)


def assert_reads_as(twin: ReplayStore, store: ReplayStore, gone: set[int], rng: random.Random) -> None:
    """Compare what both read, but for the groups of which something is `gone`, which are refused."""
    left = [lease for lease in twin.completed if lease not in gone]
    assert sorted(store.completed) == sorted(left)
    some = rng.sample(left, min(3, len(left)))
    assert as_bytes(store.read(some)) == as_bytes(twin.read(some))
    for lease in rng.sample(sorted(gone), min(2, len(gone))):
        with pytest.raises(LostDataError, match="was retired to save space"):
            store.read([lease])


@pytest.mark.first(2, others=pytest.mark.nightly)
@pytest.mark.usefixtures("merge_four", "no_fsync")
@pytest.mark.parametrize(
    "seed",
    [
        0,
        *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 5)),
        *(pytest.param(n, marks=pytest.mark.nightly) for n in range(5, 24)),
    ],
)
def test_a_store_that_forgets_is_like_its_twin_that_does_not(tmp_path, seed):
    """Appends, redeliveries, closing, merging, settling, retiring, crashes and restarts in any order."""
    rng = random.Random(seed)
    forgets, twin = ReplayStore.open(tmp_path / "a"), ReplayStore.open(tmp_path / "b")
    waiting = [(lease, n) for lease in range(40) for n in range(3)]
    settled, gone, seen, issued = set(), set(), 0, 0
    events = [*["append"] * 6, *["close", "settle", "retire"] * 2, "again", "merge", "end", "crash"]
    for _ in range(120):
        event = rng.choice(events)
        if event == "append" and waiting:
            keys = [waiting.pop(rng.randrange(min(12, len(waiting)))) for _ in range(min(2, len(waiting)))]
            some = [trajectory(lease, n, 3) for lease, n in keys]
            assert forgets.append(some) == twin.append(some)
            issued = max([issued, *(t.lease_id + 1 for t in some)])
        elif event == "again" and issued:
            lease = rng.randrange(issued)
            some = [
                trajectory(lease, n, 3) for n in range(3) if lease in settled or (lease, n) not in waiting
            ]
            assert forgets.append(some) == ([] if lease in settled else twin.append(some))
        elif event == "close" and issued:
            lease = rng.randrange(max(0, issued - 6), issued)
            if lease not in settled:
                assert forgets.close_short([lease], fewest=2) == twin.close_short([lease], fewest=2)
                waiting = [key for key in waiting if key[0] != lease or lease not in twin.completed]
        elif event == "merge":
            forgets.compact()
        elif event == "settle":
            seen = max(seen, rng.randint(0, twin.completions))
            trained = set(rng.sample(twin.completed[:seen], seen * 3 // 4)) | settled
            again = set(rng.sample(sorted(settled), len(settled) // 3))  # a learner went back
            forgets.settle(issued, (set(range(issued)) - trained) | again, seen=seen)
            settled = trained
        elif event == "retire":
            gone |= retire_settled(forgets, settled, rng)
        elif event in ("end", "crash"):
            forgets.close() if event == "end" else crashed(forgets)
            forgets = reopened(tmp_path / "a", rng)
        assert forgets.completions == twin.completions
        assert forgets.completed_after(seen, 99) == twin.completed[seen:]
        assert forgets.trajectories == twin.trajectories
        assert_reads_as(twin, forgets, gone, rng)
    assert len(settled) > 5
    forgets.close()
    twin.close()


# --- bounds ---


@pytest.mark.usefixtures("merge_four", "no_fsync")
def test_memory_and_side_files_do_not_grow_with_what_was_trained(tmp_path, monkeypatch):
    monkeypatch.setattr("storage.store.replay.UNINDEXED_SEGMENTS", 4)
    sizes: list[tuple[int, ...]] = []
    side_files = [tmp_path / FILE, tmp_path / INDEX_FILE]
    with closing(ReplayStore.open(tmp_path)) as store:
        for lease in range(0, 160, 4):
            store.append([t for n in range(4) for t in group(lease + n)])
            store.settle(lease + 4, range(max(0, lease - 8), lease + 4), seen=lease + 4)
            while store.compact():
                pass
            for entry in store.entries:
                if not entry.retired and entry.leases.stop < lease - 40:
                    store.retire(entry, None)
            held = store._held
            sizes.append(
                (
                    store.rows_in_memory,
                    len(held.groups.order),
                    len(held.layout.entries),
                    *(path.stat().st_size // 100 if path.exists() else 0 for path in side_files),
                )
            )
        assert len(names(tmp_path)) == len(store.entries) < 20
    middle, end = sizes[16:28], sizes[28:]
    for early, late in zip(zip(*middle, strict=True), zip(*end, strict=True), strict=True):
        assert max(late) <= max(early) + 2


# --- at work ---


@pytest.mark.nats
@pytest.mark.usefixtures("quick")
async def test_a_shard_forgets_what_a_checkpoint_holds_and_a_learner_can_still_go_back(
    bus, tmp_path, monkeypatch
):
    monkeypatch.setattr(retention, "PERIOD_S", 0.05)
    monkeypatch.setattr(retention, "ROWS_IN_MEMORY", 1)
    learner = LearnerStandIn(bus)
    async with serving(bus, tmp_path) as storage:
        store = storage.stores[0]
        async with running(lambda stop: keep_house(bus, store, Retention(), stop, shard=0)):
            await learner.publish(0)
            await until(lambda: storage.ledger.next_id == 4)
            await send_groups(bus, [0, 1, 2])
            await until(lambda: {0, 1, 2} <= set(storage.ledger.stored))
            assert await learner.batch(1) == [0, 1]
            await until(lambda: store.rows_in_memory == 4)
            await learner.commit(1)
            await until(lambda: store.rows_in_memory == 2)
            await send_groups(bus, [0])  # once more, after the bus has forgotten its id
            await until(lambda: storage.ledger.account().stored == 1)
            assert store.trajectories == 4
            await learner.resume(0)
            assert await learner.batch(1) == [0, 1]
            assert len(store.read([0])) == 2
