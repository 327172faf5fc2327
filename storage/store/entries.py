"""What a replay directory consists of, by the names in it, and which of it to merge or to retire.

Segments are numbered in the order of writing. An entry is one segment, several merged, or what is left of
them when they are retired, and its name says which: `segment_00000004`, `segment_00000004-00000051`,
`retired_00000004-00000051`. An entry that covers another's numbers replaces it, and a retired entry the
segment of the same numbers: so one rename switches, and whatever a crash leaves counts once.
"""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bus.errors import StorageError

MERGE_SEGMENTS = 48
"""So many neighbours of similar size become one."""
MERGED_BYTES = 256 << 20
"""Fewer of them when together they reach this size."""
SMALL_BYTES = (1 << 20, 16 << 20)
"""Below the first, segments are merged with their like; later what came of it, below the second."""

_NAME = re.compile(r"(segment|retired)_(\d{8,})(?:-(\d{8,}))?")


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """A range of segment numbers, and what the directory holds of it."""

    first: int
    last: int
    retired: bool = False
    size_bytes: int = 0
    written_s: float = 0.0
    """When its newest trajectory was written, in seconds since the epoch."""

    @property
    def name(self) -> str:
        """Name of its directory, or of its file once it is retired."""
        kind = "retired" if self.retired else "segment"
        return f"{kind}_{self.first:08d}" + (f"-{self.last:08d}" if self.last > self.first else "")

    @property
    def numbers(self) -> range:
        """Numbers of the segments that it covers."""
        return range(self.first, self.last + 1)

    @classmethod
    def parse(cls, path: Path) -> "SegmentEntry":
        """Return the entry with the name of `path`. Raises `StorageError` when it names none."""
        match = _NAME.fullmatch(path.name)
        if match is None:
            raise StorageError(f"{path} is foreign: restore the replay directory or move this away")
        first = int(match[2])
        return cls(first, int(match[3] or first), retired=match[1] == "retired")

    def replaces(self, other: "SegmentEntry") -> bool:
        """Whether `other` is what this one was made of."""
        if (self.first, self.last) == (other.first, other.last):
            return self.retired and not other.retired
        return self.first <= other.first and other.last <= self.last


def find_entries(directory: Path) -> tuple[list[SegmentEntry], list[SegmentEntry]]:
    """The entries of `directory` in order, without a gap from 0 on; and those that others replace.

    Raises `StorageError` naming what is foreign or follows a gap."""
    found = [SegmentEntry.parse(path) for path in directory.iterdir() if not path.name.startswith(".")]
    found.sort(key=lambda entry: (entry.first, -entry.last, not entry.retired))
    entries: list[SegmentEntry] = []
    replaced: list[SegmentEntry] = []
    for entry in found:
        if entries and entries[-1].replaces(entry):
            replaced.append(entry)
        elif entry.first != (entries[-1].last + 1 if entries else 0):
            raise StorageError(
                f"{directory / entry.name} is here but an earlier segment is missing: restore the replay "
                "directory or move this away"
            )
        else:
            entries.append(entry)
    return entries, replaced


def choose_merge(entries: Iterable[SegmentEntry]) -> list[SegmentEntry]:
    """Neighbours that are due to become one; empty when none are. A byte is rewritten a few times at most."""
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
    """The entry that replaces these neighbours."""
    ordered = sorted(entries, key=lambda entry: entry.first)
    written_s = max(entry.written_s for entry in entries)
    return SegmentEntry(ordered[0].first, ordered[-1].last, size_bytes=size_bytes, written_s=written_s)
