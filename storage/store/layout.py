"""The segments of a replay directory: by their names, which to merge or retire, and which row lies where.

Segments are numbered in the order of writing. An entry is one segment, several merged, or what is left of
them when they are retired, and its name says which: `segment_00000004`, `segment_00000004-00000051`,
`retired_00000004-00000051`. An entry that covers another's numbers replaces it, and a retired entry the
segment of the same numbers: so one rename switches, and whatever a crash leaves counts once."""

import re
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from bus.errors import LostDataError
from storage.store.segments import Segment, Summary

K = TypeVar("K", bound=Hashable)
MERGE_SEGMENTS = 48
"""So many neighbours of similar size become one."""
MERGED_BYTES = 256 << 20
"""Fewer neighbours become one when together they reach this size."""
SMALL_BYTES = (1 << 20, 16 << 20)
"""Below the first, segments are merged with their like; later what came of it, below the second."""
MAPPED_SEGMENTS = 128
"""Segments that stay mapped at once."""
_NAME = re.compile(r"(segment|retired)_(\d{8,})(?:-(\d{8,}))?")


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """A range of segment numbers, and what the directory holds of it."""

    first: int
    last: int
    retired: bool = False
    size_bytes: int = 0
    written_s: float = 0.0
    """When the segment's newest trajectory was written, in seconds since the epoch."""
    leases: range = range(0)
    """From the lowest lease of its trajectories to the highest."""

    @property
    def name(self) -> str:
        """Return the name of its directory, or of its file once it is retired."""
        kind = "retired" if self.retired else "segment"
        return f"{kind}_{self.first:08d}" + (f"-{self.last:08d}" if self.last > self.first else "")

    @property
    def numbers(self) -> range:
        """Numbers of the segments that the entry covers."""
        return range(self.first, self.last + 1)

    @classmethod
    def parse(cls, path: Path) -> "SegmentEntry":
        """Return the entry with the name of `path`. Raises `StorageError` when it names none."""
        match = _NAME.fullmatch(path.name)
        if match is None:
            raise LostDataError(f"{path} is foreign: restore the replay directory or move this away")
        first = int(match[2])
        return cls(first, int(match[3] or first), retired=match[1] == "retired")

    def replaces(self, other: "SegmentEntry") -> bool:
        """Return whether `other` is what this one was made of."""
        if (self.first, self.last) == (other.first, other.last):
            return self.retired and not other.retired
        return self.first <= other.first and other.last <= self.last


def find_entries(directory: Path) -> tuple[list[SegmentEntry], list[SegmentEntry]]:
    """Return the entries of `directory` in order, without a gap from 0 on; and those that others replace.
    Raises `StorageError` naming what is foreign or follows a gap."""
    found = [SegmentEntry.parse(path) for path in directory.iterdir() if not path.name.startswith(".")]
    found.sort(key=lambda entry: (entry.first, -entry.last, not entry.retired))
    entries: list[SegmentEntry] = []
    replaced: list[SegmentEntry] = []
    for entry in found:
        if entries and entries[-1].replaces(entry):
            replaced.append(entry)
        elif entry.first != (entries[-1].last + 1 if entries else 0):
            raise LostDataError(
                f"{directory / entry.name} is here but an earlier segment is missing: restore the replay "
                "directory or move this away"
            )
        else:
            entries.append(entry)
    return entries, replaced


def choose_merge(entries: Iterable[SegmentEntry]) -> list[SegmentEntry]:
    """Return neighbours that are due to be merged, if any. A byte is rewritten a few times at most."""
    ordered = list(entries)
    for tiny, small in pairwise((0, *SMALL_BYTES)):
        run: list[SegmentEntry] = []
        size_bytes = similar = 0
        for entry in ordered:
            if entry.retired or entry.size_bytes >= small:
                run, size_bytes, similar = [], 0, 0
                continue
            run.append(entry)
            size_bytes += entry.size_bytes
            similar += entry.size_bytes >= tiny
            if similar >= MERGE_SEGMENTS or (similar > 1 and size_bytes >= MERGED_BYTES):
                return run
    return []


def choose_retirement(
    entries: Sequence[SegmentEntry],
    *,
    retain_bytes: int | None,
    oldest_s: float,
    settled: Callable[[SegmentEntry], bool],
) -> list[SegmentEntry]:
    """Choose what to retire, oldest first: what was written before `oldest_s`, what exceeds `retain_bytes`.
    An entry that is not `settled` stays, and younger ones go in its place; asked only where it matters."""
    present = [entry for entry in entries if not entry.retired]
    excess = 0 if retain_bytes is None else sum(entry.size_bytes for entry in present) - retain_bytes
    chosen: list[SegmentEntry] = []
    for entry in present:
        if (entry.written_s < oldest_s or excess > 0) and settled(entry):
            chosen.append(entry)
            excess -= entry.size_bytes
    return chosen


def merged(entries: Collection[SegmentEntry], size_bytes: int = 0) -> SegmentEntry:
    """Return the entry that replaces these neighbours."""
    ordered = sorted(entries, key=lambda entry: entry.first)
    written_s = max(entry.written_s for entry in entries)
    return SegmentEntry(
        ordered[0].first,
        ordered[-1].last,
        size_bytes=size_bytes,
        written_s=written_s,
        leases=hull([entry.leases for entry in entries]),
    )


def hull(ranges: Iterable[range]) -> range:
    held = [each for each in ranges if each]
    return range(min(r.start for r in held), max(r.stop for r in held)) if held else range(0)


def covered_entries(
    entries: Sequence[SegmentEntry], found: Sequence[Summary | None], indexed: NDArray[np.int64]
) -> tuple[int, list[int]]:
    """Count the first entries that an index covers, 0 if it is of other segments; and say where each ends.

    Args:
        entries: what the directory holds.
        found: what each says of itself.
        indexed: `IndexFile.entries`; some may have been merged since."""
    end_of = dict(indexed[:, :2].tolist())
    newest = max(end_of, default=-1)
    ends: list[int] = []
    for entry, summary in zip(entries, found, strict=True):
        if entry.last > newest:
            break
        end = end_of.get(entry.last)
        if end is None or (summary is not None and summary.trajectories != end - (ends or [0])[-1]):
            return 0, []
        ends.append(end)
    return len(ends), ends


class SegmentLayout:
    """The entries of `directory` in order, with so many rows each. Threads that share it take turns."""

    def __init__(
        self, directory: Path, entries: Sequence[SegmentEntry] = (), rows: Sequence[int] = ()
    ) -> None:
        self.entries = list(entries)
        self._directory = directory
        *self._begins, self.end = accumulate(rows, initial=0)
        """First row of each entry, and the row after the last one's."""
        self._mapped: MappedSegments[int] = MappedSegments(MAPPED_SEGMENTS)  # by an entry's first segment

    def path(self, entry: SegmentEntry) -> Path:
        """Return where an entry is, or is to be."""
        return self._directory / entry.name

    def add(self, entry: SegmentEntry, end: int) -> None:
        """The next segment, with the rows from the last one's end to `end`."""
        self.entries.append(entry)
        self._begins.append(self.end)
        self.end = end

    def switch(self, old: Sequence[SegmentEntry], new: SegmentEntry) -> None:
        """Read from `new` from now on what was read from these neighbours: the same rows."""
        at = self.entries.index(old[0])
        self.entries[at : at + len(old)] = [new]
        self._begins[at : at + len(old)] = [self._begins[at]]
        for entry in old:
            self._mapped.drop(entry.first)

    @property
    def segments(self) -> int:
        """Return the number of segments ever written."""
        return self.entries[-1].last + 1 if self.entries else 0

    def table(self) -> NDArray[np.int64]:
        """Return `IndexFile.entries`."""
        ends = [*self._begins[1:], self.end]
        rows = [
            (p.last, end, p.leases.start, p.leases.stop - 1)
            for p, end in zip(self.entries, ends, strict=False)
        ]
        return np.array(rows, np.int64).reshape(-1, 4)

    def placed(self) -> list[tuple[SegmentEntry, int]]:
        """Return every entry and its first row."""
        return list(zip(self.entries, self._begins, strict=True))

    def position(self, entry: SegmentEntry) -> int:
        """Return where an entry is among all."""
        return bisect_left(self.entries, entry.first, key=lambda p: p.first)

    def place_of(self, row: int) -> tuple[SegmentEntry, int]:
        """Return the entry that a row lies in, and its row there. Raises `StorageError` when that was
        retired."""
        n = bisect_right(self._begins, row) - 1
        entry = self.entries[n]
        if entry.retired:
            raise LostDataError(
                f"{self.path(entry)} was retired to save space: restore its segment from the archive"
            )
        return entry, row - self._begins[n]

    def segment_of(self, row: int) -> tuple[Segment, range]:
        """Return the mapped segment of a row, and its rows. Raises `StorageError` as `place_of`."""
        entry, at = self.place_of(row)
        segment = self.mapped(entry)
        return segment, range(row - at, row - at + segment.summary.trajectories)

    def mapped(self, entry: SegmentEntry) -> Segment:
        """Return the mapped segment of an entry that is not retired."""
        return self._mapped.get(entry.first, lambda: Segment(self.path(entry)))

    def close(self) -> None:
        self._mapped.close()


class MappedSegments(Generic[K]):
    """Keeps a few segments mapped, which each hold a file descriptor. Threads that share them take turns."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._segments: OrderedDict[K, Segment] = OrderedDict()

    def get(self, key: K, opened: Callable[[], Segment]) -> Segment:
        """Return the segment of `key`, `opened` unless it is here; it becomes the last to be unmapped."""
        if key in self._segments:
            self._segments.move_to_end(key)
            return self._segments[key]
        segment = opened()
        if len(self._segments) >= self._most:
            self._segments.popitem(last=False)[1].close()
        self._segments[key] = segment
        return segment

    def drop(self, key: K) -> None:
        if (segment := self._segments.pop(key, None)) is not None:
            segment.close()

    def close(self) -> None:
        while self._segments:
            self._segments.popitem()[1].close()
