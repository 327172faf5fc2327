"""One shard's trajectories on disk: immutable segments, an index of groups in memory, reads by mapping."""

import fcntl
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from io import BufferedRandom
from pathlib import Path
from typing import Self

from bus.errors import SchemaError, StorageError
from bus.messages import Trajectory
from storage.files import make_directory, remove_leftovers
from storage.segments import Segment, read_records, write_segment

MAPPED_SEGMENTS = 64
"""Segments kept mapped at once; each holds four file descriptors."""

_ROW_BITS = 32


class ReplayStore:
    """Trajectories of one shard: appended by one writer, read from any thread.

    A trajectory is known by its lease and sample, which its `trajectory_id` names: storing it again does
    nothing. A group is complete when all `group_size` samples are stored."""

    def __init__(self, directory: Path, *, writable: bool = True) -> None:
        self.directory = directory
        self.completed: list[int] = []
        """Leases in the order in which their groups became complete; it only grows. Do not modify."""
        self.trajectories = 0
        self.size_bytes = 0
        self._segments = 0
        self._groups = _GroupIndex()
        self._mapped: OrderedDict[int, Segment] = OrderedDict()
        self._mutex = threading.Lock()  # guards `_groups` and `_mapped`
        self._lock = _lock(directory) if writable else None

    @classmethod
    def open(cls, directory: Path, *, writable: bool = True) -> Self:
        """Scan the segments of `directory`, made if missing; a writer also clears what a crash left over.

        Raises `StorageError` naming a torn or foreign segment, or when another writer has it open."""
        if writable:
            make_directory(directory)
        store = cls(directory, writable=writable)
        try:
            if writable:
                remove_leftovers(directory)
            store._scan()
        except BaseException:
            store.close()
            raise
        return store

    def append(self, trajectories: Sequence[Trajectory]) -> list[int]:
        """Store those not stored yet as one new segment; the leases whose groups this completed, in order.

        On return they are on the disk. Otherwise nothing is stored: the disk refuses (`StorageError`), or
        siblings disagree on their group's size, where a retry cannot help (`SchemaError`)."""
        if self._lock is None:
            raise StorageError(f"{self.directory} was opened for reading")
        fresh = self._groups.fresh(trajectories)
        if not fresh:
            return []
        size_bytes = write_segment(self._path(self._segments), fresh)
        return self._admit(((t.lease_id, t.sample, t.group_size) for t in fresh), size_bytes)

    def read(self, lease_ids: Iterable[int]) -> list[Trajectory]:
        """The trajectories of these complete groups, each group in the order of its samples.

        Raises `StorageError` for a group that is unknown or incomplete, or whose bytes have changed."""
        with self._mutex:
            return [self._at(location) for lease in lease_ids for location in self._groups.complete(lease)]

    def trajectories_of(self, lease_id: int) -> list[Trajectory]:
        """What is stored of a group, complete or not, in the order of its samples."""
        with self._mutex:
            return [self._at(location) for location in self._groups.stored(lease_id)]

    def close(self) -> None:
        """Unmap every file and let another writer in. Trajectories already read stay valid."""
        with self._mutex:
            while self._mapped:
                self._mapped.popitem()[1].close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _path(self, segment: int) -> Path:
        return self.directory / f"segment_{segment:08d}"

    def _scan(self) -> None:
        found = {path for path in self.directory.iterdir() if not path.name.startswith(".")}
        expected = [self._path(segment) for segment in range(len(found))]
        for path in sorted(found.difference(expected)):
            what = (
                "is here but an earlier segment is missing"
                if path.name.startswith("segment_")
                else "is foreign"
            )
            raise StorageError(f"{path} {what}: restore the replay directory or move this away")
        for path in expected:
            records = read_records(path)
            columns = (records.columns[name] for name in ("lease_id", "sample", "group_size"))
            self._admit(zip(*columns, strict=True), records.size_bytes)

    def _admit(self, rows: Iterable[tuple[int, int, int]], size_bytes: int) -> list[int]:
        """Index the (lease_id, sample, group_size) of the next segment's rows."""
        completed = []
        with self._mutex:
            for row, (lease_id, sample, group_size) in enumerate(rows):
                self.trajectories += 1
                location = self._segments << _ROW_BITS | row
                if self._groups.add(lease_id, sample, group_size, location):
                    completed.append(lease_id)
            self._segments += 1
            self.size_bytes += size_bytes
            self.completed += completed
        return completed

    def _at(self, location: int) -> Trajectory:
        segment, row = location >> _ROW_BITS, location & (1 << _ROW_BITS) - 1
        return self._segment(segment).trajectory(row)

    def _segment(self, number: int) -> Segment:
        """Mapped, and the last to be unmapped."""
        segment = self._mapped.get(number)
        if segment is not None:
            self._mapped.move_to_end(number)
            return segment
        if len(self._mapped) >= MAPPED_SEGMENTS:
            self._mapped.popitem(last=False)[1].close()
        self._mapped[number] = Segment(self._path(number))
        return self._mapped[number]


class _GroupIndex:
    """Which samples of which groups are stored, and where: eight bytes a sample once a group is complete."""

    def __init__(self) -> None:
        self._complete: dict[int, array[int]] = {}
        self._partial: dict[int, dict[int, int]] = {}  # sample -> location
        self._sizes: dict[int, int] = {}  # of the partial groups

    def fresh(self, trajectories: Iterable[Trajectory]) -> list[Trajectory]:
        """Those not stored yet, each once. Raises `SchemaError` when siblings disagree on `group_size`."""
        fresh: dict[tuple[int, int], Trajectory] = {}
        sizes: dict[int, int] = {}
        for t in trajectories:
            size = self._size(t.lease_id) or sizes.setdefault(t.lease_id, t.group_size)
            if t.group_size != size:
                raise SchemaError(f"{t.trajectory_id}: its group has {size} samples, it says {t.group_size}")
            if not self._holds(t.lease_id, t.sample):
                fresh.setdefault((t.lease_id, t.sample), t)
        return list(fresh.values())

    def add(self, lease_id: int, sample: int, group_size: int, location: int) -> bool:
        """Whether this sample completed its group."""
        partial = self._partial.setdefault(lease_id, {})
        partial[sample] = location
        if len(partial) < group_size:
            self._sizes[lease_id] = group_size
            return False
        self._complete[lease_id] = array("q", (partial[sample] for sample in sorted(partial)))
        del self._partial[lease_id]
        self._sizes.pop(lease_id, None)
        return True

    def complete(self, lease_id: int) -> Sequence[int]:
        """Locations of a complete group's samples; raises `StorageError` for any other."""
        locations = self._complete.get(lease_id)
        if locations is None:
            stored = len(self._partial.get(lease_id, ()))
            what = (
                f"{stored} of its {self._sizes[lease_id]} trajectories are" if stored else "nothing of it is"
            )
            raise StorageError(f"group of lease {lease_id} cannot be read: {what} stored")
        return locations

    def stored(self, lease_id: int) -> Sequence[int]:
        """Locations of the samples that are stored."""
        partial = self._partial.get(lease_id, {})
        return self._complete.get(lease_id) or [partial[sample] for sample in sorted(partial)]

    def _size(self, lease_id: int) -> int | None:
        """`group_size`, as far as any sample is stored."""
        complete = self._complete.get(lease_id)
        return len(complete) if complete is not None else self._sizes.get(lease_id)

    def _holds(self, lease_id: int, sample: int) -> bool:
        return lease_id in self._complete or sample in self._partial.get(lease_id, ())


def _lock(directory: Path) -> BufferedRandom:
    """Become the only writer until the file is closed, by us or by our death."""
    file = (directory / ".lock").open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise StorageError(f"{directory} is being written by another process: stop that one first") from error
    return file
