"""Which rows of a shard lie in which entry of its directory."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from bus.errors import StorageError
from storage.store.entries import SegmentEntry
from storage.store.mapped import MappedSegments
from storage.store.segments import Segment

MAPPED_SEGMENTS = 128


class Layout:
    """The entries of `directory` in order, with so many rows each. Threads that share it take turns."""

    def __init__(
        self, directory: Path, entries: Sequence[SegmentEntry] = (), rows: Sequence[int] = ()
    ) -> None:
        begins = list(accumulate(rows, initial=0))
        self.entries = list(entries)
        self.ends: array[int] = array(
            "q", (end for entry, end in zip(entries, begins[1:], strict=True) for _ in entry.numbers)
        )
        """Row at which each segment ever written ends; it is exact wherever an entry ends."""
        self._directory = directory
        self._begins = begins[:-1]
        """First row of each entry."""
        self._mapped: MappedSegments[int] = MappedSegments(MAPPED_SEGMENTS)  # by their entry's first segment

    def path(self, entry: SegmentEntry) -> Path:
        """Where an entry is, or is to be."""
        return self._directory / entry.name

    def add(self, entry: SegmentEntry, end: int) -> None:
        """The next segment, with the rows from the last one's end to `end`."""
        self.entries.append(entry)
        self._begins.append(self.ends[-1] if self.ends else 0)
        self.ends.append(end)

    def switch(self, old: Sequence[SegmentEntry], new: SegmentEntry) -> None:
        """Read from `new` from now on what was read from these neighbours: the same rows."""
        at = self.entries.index(old[0])
        self.entries[at : at + len(old)] = [new]
        self._begins[at : at + len(old)] = [self._begins[at]]
        for entry in old:
            self._mapped.drop(entry.first)

    def rows_of(self, entry: SegmentEntry) -> slice:
        """Return the rows that an entry holds, or held."""
        begin = self._begins[bisect_left(self.entries, entry.first, key=lambda p: p.first)]
        return slice(begin, self.ends[entry.last])

    def place_of(self, row: int) -> tuple[SegmentEntry, int]:
        """The entry that a row lies in, and its row there. Raises `StorageError` when that was retired."""
        n = bisect_right(self._begins, row) - 1
        entry = self.entries[n]
        if entry.retired:
            raise StorageError(
                f"{self.path(entry)} was retired to save space: restore its segment from the archive"
            )
        return entry, row - self._begins[n]

    def segment_of(self, row: int) -> tuple[Segment, int]:
        """Return the mapped segment of a row, and its place in it. Raises `StorageError` as `place_of`."""
        entry, at = self.place_of(row)
        return self._mapped.get(entry.first, lambda: Segment(self.path(entry))), at

    def close(self) -> None:
        """Unmap everything."""
        self._mapped.close()
