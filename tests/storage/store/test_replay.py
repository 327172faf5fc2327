import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.storage import ZipStore

from bus.codec import encode
from bus.errors import LostDataError, SchemaError, StorageError
from bus.messages import group_name
from bus.trajectory import Parent, Trajectory, Turn
from storage.store import layout
from storage.store import zip_files as zipped
from storage.store.loading import INDEX_FILE
from storage.store.replay import ReplayStore
from storage.store.segments import FILE, RECORD_FIELDS, ROW_COLUMNS, TOKEN_ARRAYS, Segment
from storage.store.zip_files import map_entries

PROPERTY = settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def trajectory(lease_id: int, sample: int, group_size: int = 2, length: int | None = None) -> Trajectory:
    """Made from its lease and sample alone, like a rollout that is done twice."""
    rng = np.random.default_rng([lease_id, sample])
    length = length or int(rng.integers(1, 30))
    mask = rng.random(length) < 0.7
    mask[-1] = True
    return Trajectory(
        trajectory_id=f"{group_name(lease_id)}.{sample}",
        group_id=group_name(lease_id),
        lease_id=lease_id,
        sample=sample,
        group_size=group_size,
        rollout=sample // 2,
        token_ids=rng.integers(0, 2**31 - 1, length, dtype=np.int32),
        loss_mask=mask,
        behaviour_logprobs=-rng.random(length, dtype=np.float32),
        policy_versions=np.where(mask, rng.integers(0, 9, length), -1).astype(np.int32),
        turns=turns_of(length, lease_id),
        reward=float(rng.random()) / 3,
        end="length" if sample % 3 else "completed",
        agent="critic" if sample % 2 else "solver",
        parent=Parent(f"{group_name(lease_id)}.0", length // 2) if sample else None,
        reward_components={"format": 0.25} if lease_id % 2 else {},
        actor="actor-é",
        metadata={"turns": [1, None, "x"], "nested": {"a": 0.1}} if lease_id % 2 else {},
    )


def turns_of(length: int, lease_id: int) -> tuple[Turn, ...]:
    """Two turns over all tokens, which are drawn at different temperatures."""
    last = Turn(length // 2, length, "length", temperature=0.7, top_p=0.9, top_k=5, reward=0.5)
    return Turn(0, length // 2, "stop", reward=None if lease_id % 2 else -1.0), last


def group(lease_id: int, group_size: int = 2) -> list[Trajectory]:
    return [trajectory(lease_id, sample, group_size) for sample in range(group_size)]


def as_bytes(trajectories) -> list[bytes]:
    return [encode(t) for t in trajectories]


def segments_of(directory: Path) -> list[Path]:
    return sorted(directory.glob("segment_*"))


@contextmanager
def closing_store(directory: Path):
    with closing(ReplayStore.open(directory)) as store:
        yield store


@st.composite
def appends(draw):
    """Groups of mixed sizes, their samples shuffled, some repeated, some withheld, cut into batches."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    slots = [(lease, sample, size) for lease, size in enumerate(sizes) for sample in range(size)]
    arriving = draw(st.lists(st.sampled_from(slots), min_size=1, max_size=40))
    cuts = sorted(draw(st.lists(st.integers(0, len(arriving)), max_size=6)))
    return [arriving[a:b] for a, b in zip([0, *cuts], [*cuts, len(arriving)], strict=True)]


@PROPERTY
@given(batches=appends(), reopen=st.booleans())
def test_any_batching_with_duplicates_reads_back_bit_for_bit(tmp_path_factory, batches, reopen):
    directory = tmp_path_factory.mktemp("shard")
    store = ReplayStore.open(directory)
    seen: set[tuple[int, int]] = set()
    completed: list[int] = []
    for batch in batches:
        expected = []
        for lease, sample, size in batch:
            if (lease, sample) not in seen:
                seen.add((lease, sample))
                if sum(slot[0] == lease for slot in seen) == size:
                    expected.append(lease)
        assert store.append([trajectory(*slot) for slot in batch]) == expected
        completed += expected
        if reopen:
            store.close()
            store = ReplayStore.open(directory)
    sizes = {lease: size for batch in batches for lease, _, size in batch}
    for lease, size in sizes.items():
        stored = [trajectory(lease, s, size) for s in range(size) if (lease, s) in seen]
        assert as_bytes(store.trajectories_of(lease)) == as_bytes(stored)
    assert store.completed == completed
    assert store.trajectories == len(seen)
    everything = [t for lease in completed for t in group(lease, sizes[lease])]
    assert as_bytes(store.read(completed)) == as_bytes(everything)
    files = (path for path in directory.glob("segment_*/**/*") if path.is_file())
    assert store.size_bytes == sum(path.stat().st_size for path in files)
    store.close()


def test_a_segment_is_a_zarr_group_that_the_zarr_api_reads(tmp_path):
    stored = [trajectory(3, 1), trajectory(3, 0), trajectory(4, 0, group_size=1)]
    store = ReplayStore.open(tmp_path)
    store.append(stored)
    [segment] = segments_of(tmp_path)
    opened = zarr.open_group(ZipStore(segment / FILE, mode="r"), mode="r")
    assert set(opened.array_keys()) == {*TOKEN_ARRAYS, "records", "rows"}
    for name, dtype in TOKEN_ARRAYS.items():
        assert opened[name].dtype == dtype
        assert opened[name].chunks == opened[name].shape
        np.testing.assert_array_equal(opened[name][:], np.concatenate([getattr(t, name) for t in stored]))
    rows = opened["rows"]
    assert rows.dtype == np.int64
    assert rows.chunks == rows.shape == (3, len(ROW_COLUMNS))
    assert rows[:, 0].tolist() == np.cumsum([len(t.token_ids) for t in stored]).tolist()
    assert rows[:, 2:5].tolist() == [[3, 1, 2], [3, 0, 2], [4, 0, 1]]
    assert opened["records"].dtype == np.uint8
    with zipfile.ZipFile(segment / FILE) as archive:
        assert opened["records"][:].tobytes() == archive.read("records/c.0")
        assert archive.testzip() is None
    opened.store.close()
    store.close()


def test_every_field_of_a_trajectory_has_a_place_in_a_segment():
    assert {*RECORD_FIELDS, *TOKEN_ARRAYS} == set(Trajectory.__dataclass_fields__)


def test_an_append_of_nothing_new_writes_no_segment(tmp_path):
    store = ReplayStore.open(tmp_path)
    assert store.append(group(0)) == [0]
    assert store.append(group(0)) == []
    assert store.append([]) == []
    assert len(segments_of(tmp_path)) == 1
    store.close()


def test_reading_an_unknown_or_incomplete_group_says_what_is_stored(tmp_path):
    store = ReplayStore.open(tmp_path)
    store.append([trajectory(7, 0, group_size=3)])
    with pytest.raises(StorageError, match="lease 7 cannot be read: 1 of its 3 trajectories are stored"):
        store.read([7])
    with pytest.raises(StorageError, match="lease 8 cannot be read: nothing of it is stored"):
        store.read([8])
    assert store.trajectories_of(8) == []
    store.close()


def test_siblings_that_disagree_on_the_group_size_store_nothing(tmp_path):
    store = ReplayStore.open(tmp_path)
    store.append([trajectory(0, 0, group_size=2)])
    with pytest.raises(SchemaError, match="its group has 2 samples, it says 3"):
        store.append([trajectory(1, 0), trajectory(0, 1, group_size=3)])
    with pytest.raises(SchemaError, match="its group has 4 samples, it says 5"):
        store.append([trajectory(2, 0, group_size=4), trajectory(2, 1, group_size=5)])
    assert store.trajectories == 1
    assert store.append([trajectory(0, 1), *group(1)]) == [0, 1]
    store.close()


def test_leftovers_of_a_killed_writer_are_ignored_and_removed(tmp_path):
    store = ReplayStore.open(tmp_path)
    store.append(group(0))
    store.close()
    [segment] = segments_of(tmp_path)
    leftover = tmp_path / ".tmp-segment_00000001"
    leftover.mkdir()
    (leftover / FILE).write_bytes((segment / FILE).read_bytes()[:500])
    reader = ReplayStore.open(tmp_path, writable=False)
    assert leftover.exists()  # it may belong to a writer at work
    assert reader.completed == [0]
    store = ReplayStore.open(tmp_path)
    assert not leftover.exists()
    assert store.append(group(1)) == [1]
    store.close()
    reader.close()


@pytest.mark.parametrize("damage", ["missing", "short", "empty", "torn in the middle", "overwritten"])
def test_a_segment_whose_file_is_not_whole_is_refused_by_name(tmp_path, damage):
    store = ReplayStore.open(tmp_path)
    store.append(group(0))
    store.append(group(1))
    store.close()
    victim = segments_of(tmp_path)[0] / FILE
    content = victim.read_bytes()
    if damage == "missing":
        victim.unlink()
    elif damage == "short":
        victim.write_bytes(content[:-1])
    elif damage == "empty":
        victim.write_bytes(b"")
    elif damage == "torn in the middle":
        victim.write_bytes(content[:1000] + content[1100:])
    else:
        victim.write_bytes(b"\0" * len(content))
    with pytest.raises(StorageError, match="segment_00000000"):
        ReplayStore.open(tmp_path)


@pytest.mark.parametrize("name", [*(f"{name}/c.0" for name in (*TOKEN_ARRAYS, "records")), "rows/c.0.0"])
def test_a_flipped_bit_is_never_trained_on(tmp_path, name):
    store = ReplayStore.open(tmp_path)
    store.append(group(0))
    store.close()
    file = segments_of(tmp_path)[0] / FILE
    content = bytearray(file.read_bytes())
    entry = bytes(map_entries(file)[name])
    content[content.index(entry) + len(entry) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(StorageError, match="segment_00000000 is corrupt"), closing_store(tmp_path) as store:
        store.read([0])


@pytest.mark.parametrize("large_bytes", [zipped.LARGE_BYTES, 16])
@pytest.mark.parametrize("lengths", [[1, 2, 3], [5], [31_000, 7, 100_000]])
def test_arrays_lie_aligned_in_the_mapped_file(tmp_path, monkeypatch, lengths, large_bytes):
    monkeypatch.setattr(zipped, "LARGE_BYTES", large_bytes)
    with closing_store(tmp_path) as store:
        store.append([trajectory(lease, 0, 1, length) for lease, length in enumerate(lengths)])
        [segment] = segments_of(tmp_path)
        with closing(Segment(segment)) as opened:
            assert all(opened.decoded(name).flags.aligned for name in (*TOKEN_ARRAYS, "records"))
        with zipfile.ZipFile(segment / FILE) as archive:
            assert archive.testzip() is None
        assert as_bytes(store.read(range(len(lengths)))) == as_bytes(
            trajectory(lease, 0, 1, length) for lease, length in enumerate(lengths)
        )


def test_foreign_and_missing_segments_are_refused_by_name(tmp_path):
    store = ReplayStore.open(tmp_path)
    for lease in range(3):
        store.append(group(lease))
    store.close()
    (tmp_path / "notes").mkdir()
    with pytest.raises(StorageError, match="notes is foreign"):
        ReplayStore.open(tmp_path)
    (tmp_path / "notes").rmdir()
    first = segments_of(tmp_path)[0]
    first.rename(tmp_path / ".away")
    with pytest.raises(StorageError, match="segment_00000001 is here but an earlier segment is missing"):
        ReplayStore.open(tmp_path)
    first.mkdir()
    (first / "zarr.json").write_text("{}")
    with pytest.raises(StorageError, match="segment_00000000 is not a replay segment"):
        ReplayStore.open(tmp_path)


def test_a_segment_of_another_format_names_both_formats(tmp_path):
    store = ReplayStore.open(tmp_path)
    store.append(group(0))
    store.close()
    file = segments_of(tmp_path)[0] / FILE
    file.write_bytes(file.read_bytes().replace(b'"sluice_replay": 4', b'"sluice_replay": 3'))
    with pytest.raises(
        StorageError, match="format 3, this build reads 4: go on with the build that wrote it, or begin"
    ):
        ReplayStore.open(tmp_path)


def test_a_segment_of_the_format_without_a_zip_file_names_both_formats(tmp_path):
    store = ReplayStore.open(tmp_path)
    store.append(group(0))
    store.close()
    [segment] = segments_of(tmp_path)
    (segment / FILE).unlink()
    (segment / "zarr.json").write_text('{"attributes": {"sluice_replay": 2}, "node_type": "group"}')
    with pytest.raises(
        StorageError, match="format 2, this build reads 4: go on with the build that wrote it"
    ):
        ReplayStore.open(tmp_path)


def test_a_store_has_one_writer_and_any_number_of_readers(tmp_path):
    store = ReplayStore.open(tmp_path)
    store.append(group(0))
    with pytest.raises(StorageError, match="is being written by another process"):
        ReplayStore.open(tmp_path)
    reader = ReplayStore.open(tmp_path, writable=False)
    assert as_bytes(reader.read([0])) == as_bytes(group(0))
    with pytest.raises(StorageError, match="opened for reading"):
        reader.append(group(1))
    reader.close()
    store.close()
    ReplayStore.open(tmp_path).close()


def test_a_refused_write_leaves_nothing_and_can_be_tried_again(tmp_path, monkeypatch):
    store = ReplayStore.open(tmp_path)

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("storage.disk.atomic_files.os.fsync", full)
        with pytest.raises(StorageError, match=r"segment_00000000: .*the disk is full"):
            store.append(group(0))
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    assert store.completed == []
    assert store.append(group(0)) == [0]
    store.close()


def test_mapped_segments_are_bounded_and_results_outlive_the_store(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "MAPPED_SEGMENTS", 3)
    store = ReplayStore.open(tmp_path)
    for lease in range(8):
        store.append(group(lease))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(2):
        assert as_bytes(store.read(range(8))) == as_bytes(t for lease in range(8) for t in group(lease))
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 3
    read = store.read(range(8))
    store.close()
    assert as_bytes(read) == as_bytes(t for lease in range(8) for t in group(lease))
    del read
    assert len(list(Path("/proc/self/fd").iterdir())) == before - 1


@pytest.mark.parametrize("from_index", [True, False])
def test_the_tokens_of_a_group_are_known_after_reopening_and_merging(tmp_path, monkeypatch, from_index):
    monkeypatch.setattr(layout, "MERGE_SEGMENTS", 3)
    expected = {lease: sum(len(t.token_ids) for t in group(lease)) for lease in range(4)}
    with closing(ReplayStore.open(tmp_path)) as store:
        for lease in range(4):
            store.append(group(lease)[:1])
            store.append(group(lease)[1:])
        assert {lease: store.tokens_of(lease) for lease in store.completed} == expected
        assert store.compact()
    if not from_index:
        (tmp_path / INDEX_FILE).unlink()
    with closing(ReplayStore.open(tmp_path)) as store:
        assert {lease: store.tokens_of(lease) for lease in store.completed} == expected


def test_an_index_from_before_tokens_were_counted_says_zero(tmp_path):
    with closing(ReplayStore.open(tmp_path)) as store:
        store.append(group(0))
    with np.load(tmp_path / INDEX_FILE) as found:
        older = {name: found[name] for name in found.files if name != "tokens"}
    with (tmp_path / INDEX_FILE).open("wb") as file:
        np.savez(file, **older)
    with closing(ReplayStore.open(tmp_path)) as store:
        assert (store.completed, store.tokens_of(0)) == ([0], 0)


def test_reads_run_while_another_thread_appends(tmp_path):
    store = ReplayStore.open(tmp_path)
    writer = threading.Thread(target=lambda: [store.append(group(lease)) for lease in range(40)])
    writer.start()
    reads = 0
    while writer.is_alive() or not reads:
        leases = store.completed[-5:]
        assert as_bytes(store.read(leases)) == as_bytes(t for lease in leases for t in group(lease))
        reads += bool(leases)
        time.sleep(0.001)  # a reader that never waits holds the interpreter from the writer
    writer.join()
    assert store.completed == list(range(40))
    store.close()


APPENDING = """
import sys
sys.path[:0] = [{root!r}, {here!r}]
from pathlib import Path
from storage.store.loading import INDEX_FILE
from storage.store.replay import ReplayStore
from test_replay import trajectory
store = ReplayStore.open(Path({directory!r}))
lease = len(store.completed)
while True:
    batch = [trajectory(n, s, 4) for n in range(lease, lease + 3) for s in range(4)]
    print(*store.append(batch), flush=True)
    lease += 3
"""


@pytest.mark.slow
def test_what_a_killed_writer_reported_as_appended_is_there(tmp_path):
    here = Path(__file__).parent
    script = APPENDING.format(root=str(here.parents[2]), here=str(here), directory=str(tmp_path / "shard"))
    reported: list[int] = []
    for round_ in range(2):
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as child:
            reported += map(int, child.stdout.readline().split())
            time.sleep(random.Random(round_).uniform(0.02, 0.1))
            os.kill(child.pid, signal.SIGKILL)
            reported += map(int, child.stdout.read().split())
        store = ReplayStore.open(tmp_path / "shard")
        assert store.completed[: len(reported)] == reported
        assert len(store.completed) % 3 == 0  # the append in flight: whole or not at all
        expected = [t for lease in store.completed for t in group(lease, 4)]
        assert as_bytes(store.read(store.completed)) == as_bytes(expected)
        reported = list(store.completed)
        store.close()


def test_nothing_but_other_reads_waits_for_a_read_that_waits_for_the_disk(tmp_path, monkeypatch):
    store = ReplayStore.open(tmp_path)
    store.append(group(0))
    reading, release = threading.Event(), threading.Event()
    trajectory = Segment.trajectory

    def slow(segment, row, **options):
        reading.set()
        assert release.wait(60), "the test never released the read"
        return trajectory(segment, row, **options)

    monkeypatch.setattr(Segment, "trajectory", slow)
    with ThreadPoolExecutor(2) as threads:
        read = threads.submit(store.read, [0])
        assert reading.wait(60)
        try:
            others = threads.submit(lambda: (store.append(group(1)), store.full([0, 1]), store.locate([1])))
            stored, full, places = others.result(60)
            assert (stored, full, len(places)) == ([1], [0, 1], 2)
            assert threads.submit(lambda: store.size_bytes).result(60) > 0
            assert not read.done()
        finally:
            release.set()
        assert [t.lease_id for t in read.result(60)] == [0] * len(group(0))
    store.close()


def test_a_segment_restored_under_another_number_is_never_read_as_that_one(tmp_path):
    with closing(ReplayStore.open(tmp_path)) as store:
        for lease_id in range(3):
            store.append(group(lease_id))
    segments = segments_of(tmp_path)
    shutil.copyfile(segments[2] / FILE, segments[0] / FILE)  # as many trajectories, of another lease
    for writable in (True, False):
        with closing(ReplayStore.open(tmp_path, writable=writable)) as store:
            for ask in (lambda s: s.read([0]), lambda s: s.trajectories_of(0)):
                with pytest.raises(LostDataError, match=r"segment_00000000 holds g00000002\.0 .* of lease 0"):
                    ask(store)
            assert as_bytes(store.read([1, 2])) == as_bytes([*group(1), *group(2)])


def test_a_segment_of_another_run_is_refused_by_name(tmp_path):
    stores = {}
    for run in ("mine", "other"):
        stores[run] = tmp_path / run
        with closing(ReplayStore.open(stores[run])) as store:
            for lease in range(3):
                store.append([replace(trajectory(lease, n), run=run) for n in range(2)])
    shutil.copyfile(*(stores[run] / "segment_00000001" / FILE for run in ("other", "mine")))
    with pytest.raises(LostDataError, match=r"segment_00000001 is of run other, and .*00000000 beside it"):
        ReplayStore.open(stores["mine"])


def test_a_merged_segment_and_a_store_name_their_run(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "MERGE_SEGMENTS", 2)
    with closing(ReplayStore.open(tmp_path)) as store:
        for lease, run in enumerate(("", "mine")):  # the first came from an older actor
            store.append([replace(trajectory(lease, n), run=run) for n in range(2)])
        assert store.compact()
    with closing(ReplayStore.open(tmp_path)) as store:
        assert store.run == "mine"
