"""A store whose segments are merged, retired, archived and restored: what it says never changes."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import zarr
from test_replay import as_bytes, group, trajectory
from zarr.storage import ZipStore

from bus.errors import StorageError
from storage.disk.atomic_files import remove
from storage.store import layout
from storage.store import segment_arrays as compressed
from storage.store.archive import restore
from storage.store.layout import SegmentEntry, choose_merge, choose_retirement
from storage.store.loading import INDEX_FILE
from storage.store.replay import ReplayStore
from storage.store.segments import FILE, TOKEN_ARRAYS
from storage.store.zip_files import map_entries


@pytest.fixture
def merge_four(monkeypatch):
    monkeypatch.setattr(layout, "MERGE_SEGMENTS", 4)


def fill(directory: Path, leases: range) -> ReplayStore:
    """A group a segment, but each group's second sample in the segment after its own."""
    store = ReplayStore.open(directory)
    store.append([trajectory(leases[0], 0)])
    for lease in leases[1:]:
        store.append([trajectory(lease, 0), trajectory(lease - 1, 1)])
    store.append([trajectory(leases[-1], 1)])
    return store


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def expect(store: ReplayStore, leases: range) -> None:
    assert store.completed == list(leases)
    assert store.trajectories == 2 * len(leases)
    assert as_bytes(store.read(leases)) == as_bytes(t for lease in leases for t in group(lease))
    assert store.append([t for lease in leases for t in group(lease)]) == []


# --- the index file ---


@pytest.mark.parametrize("damage", ["none", "missing", "flipped", "short", "of_another_store", "older"])
def test_a_store_opens_the_same_whatever_its_index_file_says(tmp_path, damage):
    leases = range(10)
    fill(tmp_path / "a", leases).close()
    index = tmp_path / "a" / INDEX_FILE
    whole = index.read_bytes()
    if damage == "missing":
        index.unlink()
    elif damage == "flipped":
        index.write_bytes(whole[:200] + bytes([whole[200] ^ 1]) + whole[201:])
    elif damage == "short":
        index.write_bytes(whole[:-30])
    elif damage == "of_another_store":
        with closing(ReplayStore.open(tmp_path / "b")) as other:
            other.append(group(7, 5))
            other.append(group(8, 5))
        index.write_bytes((tmp_path / "b" / INDEX_FILE).read_bytes())
    elif damage == "older":
        leases = range(12)
        with closing(ReplayStore.open(tmp_path / "a")) as store:
            store.append([*group(10), *group(11)])
        index.write_bytes(whole)
    with closing(ReplayStore.open(tmp_path / "a")) as store:
        expect(store, leases)


def test_an_index_file_that_cannot_be_written_stops_nothing(tmp_path):
    store = fill(tmp_path, range(3))
    (tmp_path / INDEX_FILE).mkdir()
    store.close()
    (tmp_path / INDEX_FILE).rmdir()
    with closing(ReplayStore.open(tmp_path)) as store:
        expect(store, range(3))


# --- merging ---


def test_what_is_chosen_to_be_merged():
    def sized(*sizes: int) -> list[SegmentEntry]:
        return [SegmentEntry(n, n, size_bytes=size) for n, size in enumerate(sizes)]

    small, medium, large = 10_000, 4 << 20, 200 << 20
    assert choose_merge(sized(*[small] * 47)) == []
    assert choose_merge(sized(*[small] * 60)) == sized(*[small] * 48)
    assert choose_merge(sized(large, *[small] * 48))[0].first == 1
    assert choose_merge(sized(*[small] * 30, large, *[small] * 30)) == []
    assert len(choose_merge(sized(*[medium] * 24, small, *[medium] * 24))) == 49
    assert len(choose_merge(sized(*[12 << 20] * 40))) == 22  # together they reach 256 MB
    assert choose_merge(sized(*[large] * 100)) == []
    assert choose_merge([SegmentEntry(n, n, retired=True) for n in range(100)]) == []


def test_a_byte_is_rewritten_a_few_times_at_most():
    found: list[SegmentEntry] = []
    rewritten = 0
    for n in range(10_000):
        found.append(SegmentEntry(n, n, size_bytes=50_000))
        while run := choose_merge(found):
            at = found.index(run[0])
            rewritten += sum(entry.size_bytes for entry in run)
            found[at : at + len(run)] = [layout.merged(run, sum(entry.size_bytes for entry in run))]
    assert rewritten < 2.1 * 10_000 * 50_000
    assert len(found) < 120


def test_merged_segments_read_as_before(tmp_path, merge_four):
    with closing(fill(tmp_path, range(10))) as store:
        before = store.read(range(10))
        size = store.size_bytes
        while store.compact():
            pass
        assert len(names(tmp_path)) < 4
        assert store.size_bytes < size
        assert store.size_bytes == sum(
            len(data) for name, data in contents(tmp_path).items() if name[0] != "."
        )
        expect(store, range(10))
        assert as_bytes(before) == as_bytes(t for lease in range(10) for t in group(lease))
        assert store.append(group(10)) == [10]
    with closing(ReplayStore.open(tmp_path)) as store:
        expect(store, range(11))
    (tmp_path / INDEX_FILE).unlink()
    with closing(ReplayStore.open(tmp_path)) as store:
        expect(store, range(11))


def test_fifty_segments_of_a_busy_minute_become_one(tmp_path):
    with closing(fill(tmp_path, range(47))) as store:
        assert len(names(tmp_path)) == 48
        assert store.compact()
        assert names(tmp_path) == ["segment_00000000-00000047"]
        assert not store.compact()
        expect(store, range(47))


@pytest.mark.parametrize("removed", [0, 1, 3])
def test_a_crash_between_merging_and_removing_counts_nothing_twice(
    tmp_path, merge_four, monkeypatch, removed
):
    store = fill(tmp_path, range(3))
    calls = []

    def crashing(directory: Path) -> None:
        calls.append(directory)
        if len(calls) > removed:
            raise KeyboardInterrupt
        remove(directory)

    with monkeypatch.context() as patch:
        patch.setattr("storage.store.replay.remove", crashing)
        with pytest.raises(KeyboardInterrupt):
            store.compact()
    store._release()  # as death does: no index is written
    assert len(names(tmp_path)) == 1 + 4 - removed
    with closing(ReplayStore.open(tmp_path, writable=False)) as reader:
        assert as_bytes(reader.read(range(3))) == as_bytes(t for lease in range(3) for t in group(lease))
    with closing(ReplayStore.open(tmp_path)) as store:
        expect(store, range(3))
    assert names(tmp_path) == ["segment_00000000-00000003"]


def test_a_refused_merge_leaves_all_as_it_was(tmp_path, merge_four, monkeypatch):
    with closing(fill(tmp_path, range(3))) as store:
        before = names(tmp_path)

        def full(_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("storage.disk.atomic_files.os.fsync", full)
            with pytest.raises(StorageError, match="the disk is full"):
                store.compact()
        assert names(tmp_path) == before
        expect(store, range(3))


def test_a_reader_in_another_process_follows_the_writer(tmp_path, merge_four):
    with closing(fill(tmp_path, range(3))) as store:
        with closing(ReplayStore.open(tmp_path, writable=False)) as reader:
            assert store.append(group(3)) == [3]
            while store.compact():
                pass
            assert as_bytes(reader.read(range(4))) == as_bytes(t for n in range(4) for t in group(n))
        with closing(ReplayStore.open(tmp_path, writable=False)) as reader, pytest.raises(StorageError):
            reader.read([4])


@pytest.mark.slow
def test_reads_and_appends_run_while_segments_are_merged(tmp_path, merge_four):
    with closing(ReplayStore.open(tmp_path)) as store:
        done = threading.Event()

        def merge() -> None:
            while not done.is_set() or store.compact():
                store.compact()
                time.sleep(0.001)

        merging = threading.Thread(target=merge)
        merging.start()
        for lease in range(60):
            store.append(group(lease))
            assert as_bytes(store.read([lease // 2])) == as_bytes(group(lease // 2))
        done.set()
        merging.join()
        assert len(names(tmp_path)) < 20
        expect(store, range(60))


MERGING = """
import sys
sys.path[:0] = [{root!r}, {here!r}]
from pathlib import Path
from storage.store import layout
from storage.store import segment_arrays as compressed
from storage.store.replay import ReplayStore
from test_replay import group
layout.MERGE_SEGMENTS = 3
store = ReplayStore.open(Path({directory!r}))
lease = len(store.completed)
print("open", flush=True)
while True:
    store.append(group(lease))
    lease += 1
    while store.compact():
        pass
    for entry in store.entries[:-8]:
        if not entry.retired and entry.last > entry.first:
            store.retire(entry, {archive!r})
"""


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_of_its_housekeeping_loses_nothing(tmp_path):
    here = Path(__file__).parent
    script = MERGING.format(
        root=str(here.parents[2]), here=str(here), directory=str(tmp_path / "s"), archive=str(tmp_path / "a")
    )
    for n in range(4):
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout.readline() == "open\n"
            if n == 3:
                assert "segments_merged" in child.stdout.readline()  # its log
            time.sleep(0.1 + 0.067 * n)
            os.kill(child.pid, signal.SIGKILL)
    with closing(ReplayStore.open(tmp_path / "s")) as store:
        leases = range(len(store.completed))
        assert store.completed == list(leases)
        assert store.trajectories == 2 * len(leases)
        assert any(entry.last > entry.first for entry in store.entries)
    restore(tmp_path / "s", str(tmp_path / "a"))
    with closing(ReplayStore.open(tmp_path / "s")) as store:
        expect(store, leases)


# --- retiring ---


def test_what_is_chosen_to_be_retired():
    def settled(*numbers: int):
        return lambda entry: entry.first in numbers

    held = [SegmentEntry(n, n, size_bytes=100, written_s=float(n)) for n in range(5)]
    everything = settled(*range(5))

    def chosen(**how) -> list[int]:
        how = {"retain_bytes": None, "oldest_s": 0.0, "settled": everything} | how
        return [entry.first for entry in choose_retirement(held, **how)]

    assert chosen() == []
    assert chosen(oldest_s=2.0) == [0, 1]
    assert chosen(retain_bytes=250) == [0, 1, 2]
    assert chosen(retain_bytes=250, settled=settled(0, 2, 4)) == [0, 2, 4]
    assert chosen(retain_bytes=500) == []
    assert chosen(retain_bytes=0, settled=settled()) == []


@pytest.mark.parametrize("scheme", ["", "file://", "memory://"])
def test_a_segment_comes_back_from_the_archive_bit_for_bit(tmp_path, merge_four, scheme):
    archive = f"{scheme}{tmp_path}/archive/run"
    directory = tmp_path / "shard_00"
    with closing(fill(directory, range(6))) as store:
        assert store.compact()
        before = contents(directory)
        [merged, *others] = store.entries
        store.retire(merged, archive)
        store.retire(others[0], archive)
        assert store.size_bytes == sum(entry.size_bytes for entry in others[1:])
        with pytest.raises(StorageError, match=r"retired_00000000-00000003 was retired .* restore"):
            store.read([0])
        assert store.completed == list(range(6))
        assert store.append(group(0)) == []
        assert not store.compact()
    for _ in range(2):  # with the index file, and without it
        with closing(ReplayStore.open(directory)) as store:
            assert store.completed == list(range(6))
            assert store.append([*group(0), *group(5)]) == []
            assert as_bytes(store.trajectories_of(5)) == as_bytes(group(5))
        (directory / INDEX_FILE).unlink()
    assert restore(directory, archive) == ["segment_00000000-00000003", "segment_00000004"]
    merged_file = "segment_00000000-00000003/group.zip"
    assert contents(directory)[merged_file] == before[merged_file]  # it was compressed before it left
    with closing(ReplayStore.open(directory)) as store:
        expect(store, range(6))


def opened_by_zarr(file: Path) -> zarr.Group:
    return zarr.open_group(ZipStore(file, mode="r"), mode="r")


def test_zarr_opens_hot_merged_and_archived_segments_and_finds_the_same_tokens(tmp_path, merge_four):
    directory, stored = tmp_path / "shard_00", [t for lease in range(3) for t in group(lease)]
    with closing(fill(directory, range(3))) as store:
        hot = [opened_by_zarr(directory / name / FILE) for name in names(directory)][:4]
        tokens = {name: np.concatenate([each[name][:] for each in hot]) for name in TOKEN_ARRAYS}
        assert store.compact()
        merged = opened_by_zarr(directory / "segment_00000000-00000003" / FILE)
        store.retire(store.entries[0], str(tmp_path / "archive"))
    archived = opened_by_zarr(tmp_path / "archive/shard_00/segment_00000000-00000003.zip")
    for opened in (merged, archived):
        assert {codec.to_dict()["name"] for codec in opened["token_ids"].metadata.codecs} == {
            "sharding_indexed"
        }
        for name, values in tokens.items():
            np.testing.assert_array_equal(opened[name][:], values)
            assert opened[name].dtype == TOKEN_ARRAYS[name]
        assert opened.attrs["trajectories"] == opened["rows"].shape[0] <= len(stored)


@pytest.mark.parametrize("name", [*TOKEN_ARRAYS, "records", "rows"])
def test_a_flipped_bit_in_a_merged_segment_is_never_trained_on(tmp_path, merge_four, name):
    with closing(fill(tmp_path, range(3))) as store:
        assert store.compact()
    file = tmp_path / "segment_00000000-00000003" / FILE
    content = bytearray(file.read_bytes())
    [chunk] = [bytes(data) for entry, data in map_entries(file).items() if entry.startswith(f"{name}/c")]
    content[content.index(chunk) + len(chunk) // 4] ^= 1
    file.write_bytes(content)
    (tmp_path / INDEX_FILE).unlink(missing_ok=True)
    try:
        with closing(ReplayStore.open(tmp_path)) as store:
            found = as_bytes(store.read(range(3)))
    except StorageError as error:
        refusal = str(error)
    else:  # the bit was one that nothing reads: padding after the last row
        assert name == "rows"
        assert found == as_bytes(t for lease in range(3) for t in group(lease))
        return
    assert "segment_00000000-00000003 is" in refusal


def test_a_merged_segment_of_many_chunks_reads_any_trajectory(tmp_path, merge_four, monkeypatch):
    monkeypatch.setattr(compressed, "CHUNK_ROWS", 7)  # trajectories begin and end anywhere in a chunk
    with closing(fill(tmp_path, range(3))) as store:
        assert store.compact()
        for lease in (2, 0, 1, 0):
            assert as_bytes(store.read([lease])) == as_bytes(group(lease))


def test_without_an_archive_a_retired_segment_is_gone_but_known(tmp_path):
    with closing(fill(tmp_path, range(2))) as store:
        store.retire(store.entries[0], None)
        assert names(tmp_path) == ["retired_00000000", "segment_00000001", "segment_00000002"]
        assert store.append(group(0)) == []
        with pytest.raises(StorageError, match="retired"):
            store.read([0])
        assert as_bytes(store.read([1])) == as_bytes(group(1))
    with pytest.raises(StorageError, match=r"segment_00000000\.zip cannot be written or read"):
        restore(tmp_path, str(tmp_path / "nowhere"))


def test_an_archive_that_refuses_keeps_the_segment(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with closing(fill(tmp_path / "s", range(2))) as store:
        with pytest.raises(StorageError, match="cannot be written"):
            store.retire(store.entries[0], str(tmp_path / "file"))
        with pytest.raises(StorageError, match="cannot be written"):
            store.retire(store.entries[0], "nonsense://bucket")
        expect(store, range(2))


def test_a_damaged_archive_file_is_refused_and_changes_nothing(tmp_path):
    with closing(fill(tmp_path / "s", range(2))) as store:
        store.retire(store.entries[0], str(tmp_path / "a"))
    [file] = (tmp_path / "a").rglob("*.zip")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 255
    file.write_bytes(data)
    before = names(tmp_path / "s")
    with pytest.raises(StorageError, match="segment_00000000"):
        restore(tmp_path / "s", str(tmp_path / "a"))
    assert names(tmp_path / "s") == before
