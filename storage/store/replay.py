"""One shard's trajectories on disk: immutable segments, an index of groups in memory, reads by mapping."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from io import BufferedRandom
from pathlib import Path
from typing import Self

import numpy as np
import structlog
from numpy.typing import NDArray

from bus.errors import SchemaError, StorageError
from bus.messages import RewardGiven
from bus.trajectory import Trajectory
from storage.disk.atomic_files import lock_directory, make_directory, remove, remove_leftovers
from storage.store.archive import archive_segment
from storage.store.complete_groups import CompleteGroups
from storage.store.index import LARGEST_GROUP, Columns, RowIndex, load_columns, save_columns
from storage.store.layout import (
    Layout,
    SegmentEntry,
    choose_merge,
    choose_retirement,
    covered_entries,
    find_entries,
    merged,
)
from storage.store.segments import check_segment, merge_segments, read_columns, write_segment

log = structlog.get_logger()
INDEX_FILE = ".index"
READER_ATTEMPTS = 5
UNINDEXED_SEGMENTS = 256
"""The index file is written anew when it lacks so many, and a quarter of the rows."""


class ReplayStore:
    """Trajectories of one shard: appended by one writer, read from any thread.

    A trajectory is known by its lease and sample, which its `trajectory_id` names: storing it again does
    nothing. Which groups are complete is decided in storage/store/complete_groups.py.

    `append`, `give` and the housekeeping (`compact`, `retire`) may run at the same time, each in a thread."""

    def __init__(self, directory: Path, *, writable: bool = True) -> None:
        self.directory = directory
        self.rewards: Counter[str] = Counter()
        """What became of the rewards that `give` was given, since this was opened."""
        self._layout = Layout(directory)
        self._indexed = 0, 0
        """Segments and rows in the index file."""
        self._index = RowIndex()
        self.late_siblings = 0
        """Trajectories not stored, since their groups had been closed without them; from the opening on."""
        self._groups = CompleteGroups(directory, writable=writable)
        self._writing = threading.Lock()  # held while groups become complete: their order is durable
        self._mutex = threading.Lock()  # guards everything above, and is never held while the disk works
        self._reading = threading.Lock()  # held, before `_mutex`, while mapped segments are read or replaced
        self._housekeeping = threading.Lock()
        self._lock: BufferedRandom | None = lock_directory(directory) if writable else None

    @classmethod
    def open(cls, directory: Path, *, writable: bool = True) -> Self:
        """Read the index of `directory`, made if missing; a writer also clears what a crash left over.

        Raises `StorageError` naming a torn or foreign segment, or when another writer has it open."""
        if writable:
            make_directory(directory)
        store = cls(directory, writable=writable)
        try:
            store._scan()
        except BaseException:
            store._release()
            raise
        return store

    # --- questions ---

    @property
    def completed(self) -> list[int]:
        """Return the leases in the order in which their groups became complete; do not modify the list."""
        return self._groups.order

    @property
    def trajectories(self) -> int:
        """Stored ever, retired ones included."""
        return len(self._index)

    @property
    def closed_short(self) -> int:
        """Return the number of groups that were closed though siblings were missing."""
        return self._groups.closed_short

    @property
    def size_bytes(self) -> int:
        """Return the size of all segments on disk."""
        with self._mutex:
            return sum(entry.size_bytes for entry in self._layout.entries)

    @property
    def entries(self) -> tuple[SegmentEntry, ...]:
        """Return what the directory holds, in order."""
        with self._mutex:
            return tuple(self._layout.entries)

    def tokens_of(self, lease_id: int) -> int:
        """Return the number of tokens of all trajectories of a complete group."""
        return self._index.tokens(lease_id)  # without the mutex, as its rows change no more

    def leases_of(self, entry: SegmentEntry) -> NDArray[np.int64]:
        """Return the leases of the trajectories that an entry holds or held, each once."""
        return np.unique(self._columns_of(entry).leases)

    def overdue(
        self, *, retain_bytes: int | None, oldest_s: float, settled: Callable[[SegmentEntry], bool]
    ) -> list[SegmentEntry]:
        """Entries to retire by `choose_retirement`."""
        return choose_retirement(self.entries, retain_bytes=retain_bytes, oldest_s=oldest_s, settled=settled)

    # --- trajectories ---

    def append(self, trajectories: Sequence[Trajectory]) -> list[int]:
        """Store those not stored yet as one new segment; return the leases whose groups this completed.

        On return they are on the disk. Otherwise nothing is stored: the disk refuses (`StorageError`), or
        siblings disagree on their group's size, where a retry cannot help (`SchemaError`)."""
        self._refuse_reader()
        with self._writing:
            return self._append(trajectories)

    def close_short(self, lease_ids: Sequence[int], *, fewest: int) -> list[int]:
        """Count these groups as complete, durably, where so many siblings are stored; return those.

        What comes of them later is dropped. Raises `StorageError` when the disk refuses."""
        self._refuse_reader()
        with self._writing:
            return self._groups.close_short(lease_ids, fewest=fewest)

    def _append(self, trajectories: Sequence[Trajectory]) -> list[int]:
        fresh = self._fresh(trajectories)
        full = self._store(fresh) if fresh else []
        completed = self._groups.on_stored(full)
        segments, rows = self._indexed
        if len(self._layout.ends) - segments >= UNINDEXED_SEGMENTS and len(self._index) - rows >= rows // 4:
            self._save_index()
        return completed

    def _fresh(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return those not stored yet, each once; `SchemaError` if siblings disagree on `group_size`."""
        fresh: dict[tuple[int, int], Trajectory] = {}
        sizes: dict[int, int] = {}
        late = 0
        for t in trajectories:
            held = self._index.holds(t.lease_id, t.sample)
            if self._groups.is_closed(t.lease_id):
                late += not held
                continue
            size = self._index.group_size(t.lease_id) or sizes.setdefault(t.lease_id, t.group_size)
            if t.group_size != size:
                raise _misfit(t, f"its group has {size} samples, it says {t.group_size}")
            if size > LARGEST_GROUP:
                raise _misfit(t, f"a group of {size} samples cannot be stored")
            if not held:
                fresh.setdefault((t.lease_id, t.sample), t)
        self.late_siblings += late
        return list(fresh.values())

    def _store(self, fresh: Sequence[Trajectory]) -> list[int]:
        """Write these as the next segment, and index them; return the groups that are full now."""
        keys = [(t.lease_id, t.sample) for t in fresh]
        due = [key for key, t in zip(keys, fresh, strict=True) if t.reward_due]
        self._groups.rewards.expect(due, stored=keys)
        number = len(self._layout.ends)
        written = write_segment(self._layout.path(SegmentEntry(number, number)), fresh)
        entry = SegmentEntry(number, number, size_bytes=written.size_bytes, written_s=written.written_s)
        with self._mutex:
            full = [
                t.lease_id
                for t in fresh
                if self._index.add(t.lease_id, t.sample, t.group_size, len(t.token_ids))
            ]
            self._layout.add(entry, len(self._index))
        return full

    def give(self, rewards: Sequence[RewardGiven]) -> list[int]:
        """Keep rewards that come later than their trajectories; return the leases of completed groups.

        On return they are on the disk. The first reward of a trajectory is the one that counts. Otherwise
        nothing is kept: the disk refuses (`StorageError`), or one of them is for a trajectory that its group
        cannot have or that has its reward, where a retry cannot help (`SchemaError`)."""
        with self._writing:
            self._refuse_reader()
            completed, counts = self._groups.give(rewards)
            self.rewards += counts
            return completed

    def full(self, lease_ids: Iterable[int]) -> list[int]:
        """Return the groups that no trajectory will be added to; rewards may still be due."""
        with self._mutex:
            return [lease_id for lease_id in lease_ids if self._groups.is_full(lease_id)]

    def read(self, lease_ids: Iterable[int]) -> list[Trajectory]:
        """Return the trajectories of these complete groups, each group in the order of its samples.

        Their arrays are views of mapped files, one descriptor a segment, which a view keeps mapped. Raises
        `StorageError` for a group that is unknown, incomplete or retired, or whose bytes changed."""
        leases = list(lease_ids)
        found = self._read(lambda: [row for lease in leases for row in self._groups.rows(lease)])
        if due := [trajectory for trajectory in found if trajectory.reward_due]:
            raise StorageError(
                f"group of lease {due[0].lease_id} cannot be read: the reward of "
                f"{due[0].trajectory_id} is due"
            )
        return found

    def locate(self, lease_ids: Iterable[int]) -> list[tuple[SegmentEntry, int]]:
        """Return entry and row of each trajectory of these complete groups, in the order of `read`.

        Raises `StorageError` for a group that is unknown, incomplete or retired, or had rewards due."""
        leases = list(lease_ids)
        if late := [lease_id for lease_id in leases if self._groups.rewards.is_late(lease_id)]:
            raise StorageError(
                f"group of lease {late[0]} has rewards that lie apart from it: read it instead"
            )
        with self._mutex:
            return [self._layout.place_of(row) for lease in leases for row in self._groups.rows(lease)]

    def rows_of(self, lease_id: int) -> list[int]:
        """Return where a complete group is, by sample. Raises `StorageError` for any other."""
        with self._mutex:
            return self._groups.rows(lease_id)

    def trajectories_of(self, lease_id: int) -> list[Trajectory]:
        """Return what is stored of a group, complete or not, by sample; some rewards may be due."""
        return self._read(lambda: self._index.stored(lease_id))

    # --- housekeeping ---

    def compact(self) -> bool:
        """Merge one run of small neighbouring segments, if any is due; return whether one was.

        Raises `StorageError` when the disk refuses; then all is as it was."""
        with self._housekeeping:
            self._refuse_reader()
            run = choose_merge(self.entries)
            if not run:
                return False
            written = merge_segments(
                self._layout.path(merged(run)), [self._layout.path(entry) for entry in run]
            )
            with self._reading, self._mutex:
                self._layout.switch(run, merged(run, written.size_bytes))
            for entry in run:
                remove(self._layout.path(entry))
        log.info("segments_merged", store=str(self.directory), segments=len(run), bytes=written.size_bytes)
        return True

    def retire(self, entry: SegmentEntry, archive: str | None) -> None:
        """Put the segment of `entry` into the archive, if there is one, and remove it here.

        Its groups stay known, and are not stored again; `storage.archive.restore` brings them back.
        Raises `StorageError` when the archive or the disk refuses; then the segment is still here."""
        with self._housekeeping:
            self._refuse_reader()
            if archive is not None:
                archive_segment(self._layout.path(entry), archive)
            columns = self._columns_of(entry)
            retired = replace(entry, retired=True, size_bytes=0)
            save_columns(self._layout.path(retired), columns, [len(columns)])
            with self._reading, self._mutex:
                self._layout.switch([entry], retired)
            remove(self._layout.path(entry))
        log.info(
            "segment_retired", segment=str(self._layout.path(entry)), bytes=entry.size_bytes, archive=archive
        )

    def close(self) -> None:
        """Unmap every file and let another writer in. Trajectories already read stay valid."""
        with self._housekeeping:  # waits for what another thread is in the middle of
            if self._lock is not None and self._indexed != (len(self._layout.ends), len(self._index)):
                self._save_index()
            self._release()

    def _refuse_reader(self) -> None:
        if self._lock is None:
            raise StorageError(f"{self.directory} was opened for reading")

    def _columns_of(self, entry: SegmentEntry) -> Columns:
        with self._mutex:
            return self._index.columns(self._layout.rows_of(entry))

    def _read(self, find: Callable[[], list[int]]) -> list[Trajectory]:
        try:
            return self._read_once(find)
        except StorageError:
            if self._lock is not None:
                raise
        self._scan()  # the writer has stored, merged or retired since this reader looked
        return self._read_once(find)

    def _read_once(self, find: Callable[[], list[int]]) -> list[Trajectory]:
        with self._reading:
            with self._mutex:
                rows = find()
            return self._at(rows)

    def _at(self, rows: Iterable[int]) -> list[Trajectory]:
        found: list[Trajectory] = []
        held = range(0)  # rows of the segment that the last one lay in, where the next one mostly lies
        for row in rows:
            if row not in held:
                segment, held = self._layout.segment_of(row)
            trajectory = segment.trajectory(row - held.start)
            found.append(self._rewarded(trajectory) if trajectory.reward_due else trajectory)
        return found

    def _rewarded(self, trajectory: Trajectory) -> Trajectory:
        reward = self._groups.rewards.reward_of(trajectory.lease_id, trajectory.sample)
        return trajectory if reward is None else replace(trajectory, reward=reward, reward_due=False)

    def _release(self) -> None:
        with self._reading, self._mutex:
            self._layout.close()
        self._groups.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # --- the directory ---

    def _scan(self) -> None:
        if self._lock is not None:
            remove_leftovers(self.directory)
            entries, replaced = find_entries(self.directory)
            for entry in replaced:
                remove(self._layout.path(entry))
            self._load(entries)
            self._groups.on_stored([])
            return
        for attempt in range(READER_ATTEMPTS):
            try:
                self._load(find_entries(self.directory)[0])
            except StorageError:  # a writer merged or retired what was here a moment ago
                if attempt == READER_ATTEMPTS - 1:
                    raise
            else:
                return

    def _load(self, entries: list[SegmentEntry]) -> None:
        """Index these entries: by the index file as far as it goes, from there on by the segments."""
        path = self.directory / INDEX_FILE
        known, ends = Columns.none(), np.empty(0, np.int64)
        if path.exists():
            try:
                known, ends = load_columns(path)
            except StorageError as error:  # it says nothing that the segments do not say
                log.warning("replay_index_not_used", reason=str(error))
        sizes = [None if p.retired else check_segment(self._layout.path(p)) for p in entries]
        covered = covered_entries(entries, sizes, ends)
        indexed = int(ends[entries[covered - 1].last]) if covered else 0
        parts = [known[:indexed], *(self._columns_on_disk(entry) for entry in entries[covered:])]
        rows = [*np.diff([0, *(ends[p.last] for p in entries[:covered])]).tolist(), *map(len, parts[1:])]
        sized = [
            replace(p, size_bytes=size.size_bytes, written_s=size.written_s) if size else p
            for p, size in zip(entries, sizes, strict=True)
        ]
        with self._reading, self._mutex:
            self._layout.close()
            self._layout = Layout(self.directory, sized, rows)
            self._index = RowIndex(Columns.join(parts))
            self._groups.load(self._index)
            self._indexed = (entries[covered - 1].last + 1 if covered else 0), indexed

    def _columns_on_disk(self, entry: SegmentEntry) -> Columns:
        path = self._layout.path(entry)
        return load_columns(path)[0] if entry.retired else read_columns(path)

    def _save_index(self) -> None:
        try:
            save_columns(self.directory / INDEX_FILE, self._index.columns(), self._layout.ends)
        except StorageError as error:  # the next start reads the segments instead
            log.warning("replay_index_not_written", reason=str(error))
        else:
            self._indexed = len(self._layout.ends), len(self._index)


def _misfit(trajectory: Trajectory, why: str) -> SchemaError:
    reason = f"{trajectory.trajectory_id}: {why}"
    return SchemaError(reason, kind="group_size", actor=trajectory.actor)
