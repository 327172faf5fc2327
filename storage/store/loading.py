"""What a store reads when it opens: its index file as far as that goes, and from there on its segments."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import structlog

from bus.errors import LostDataError, StorageError
from storage.store.index import Columns, IndexFile, RowIndex, load_index, save_columns
from storage.store.layout import SegmentEntry, SegmentLayout, covered_entries, hull
from storage.store.retired import load_retired
from storage.store.segments import Summary, check_segment, read_columns
from storage.store.settled import FILE as SETTLED_FILE
from storage.store.settled import Settled, load_settled

log = structlog.get_logger()
INDEX_FILE = ".index"
_NOTHING = IndexFile(Columns.none(), np.empty(0, np.int64), np.empty((0, 4), np.int64))


@dataclass(frozen=True)
class Loaded:
    """A store's directory as it was found."""

    layout: SegmentLayout
    index: RowIndex
    settled: Settled
    indexed: tuple[int, int]
    """Segments and rows that the index file covers."""
    run: str = ""
    """Identity of the run whose segments they are; empty where none says so."""


def load_store(directory: Path, entries: Sequence[SegmentEntry]) -> Loaded:
    """Read what a store must know of these entries. Raises `StorageError` naming what is torn."""
    known = _load_index(directory / INDEX_FILE)
    sizes = [None if p.retired else check_segment(directory / p.name) for p in entries]
    run = _only_run(directory, entries, sizes)
    covered, ends = covered_entries(entries, sizes, known.entries)
    indexed = ends[-1] if ends else 0
    counts, ranges = np.diff([0, *ends]).tolist(), [known.lease_range(p.numbers) for p in entries[:covered]]
    here = known.rows < indexed
    parts, rows = [known.columns[here]], [known.rows[here]]
    bare = 0
    for entry in entries[covered:]:
        columns, count, leases = _columns_on_disk(directory, entry)
        if columns is None:
            bare = max(bare, leases.stop)
        else:
            parts.append(columns)
            rows.append(np.arange(sum(counts), sum(counts) + count))
        counts.append(count)
        ranges.append(leases)
    sized = [
        replace(p, leases=leases, size_bytes=found.size_bytes, written_s=found.written_s)
        if found
        else replace(p, leases=leases)
        for p, found, leases in zip(entries, sizes, ranges, strict=True)
    ]
    settled = load_settled(directory)  # after the index: a writer notes it before it forgets
    if settled.rows > sum(counts) or settled.through < bare:
        raise LostDataError(
            f"{directory / SETTLED_FILE} is not of these segments, of which some are missing, or it is: "
            "restore the replay directory"
        )
    index = RowIndex(Columns.join(parts), np.concatenate(rows), sum(counts))
    index.forget(settled)
    last = entries[covered - 1].last + 1 if covered else 0
    return Loaded(SegmentLayout(directory, sized, counts), index, settled, (last, indexed), run)


def _only_run(directory: Path, entries: Sequence[SegmentEntry], found: Sequence[Summary | None]) -> str:
    named = [(one.run, entry.name) for entry, one in zip(entries, found, strict=True) if one and one.run]
    for run, name in named:
        if run != named[0][0]:
            raise LostDataError(
                f"{directory / name} is of run {run}, and {named[0][1]} beside it of run {named[0][0]}: "
                "restore the one that was put here from another run, or move the store away"
            )
    return named[0][0] if named else ""


def save_index(directory: Path, index: RowIndex, layout: SegmentLayout) -> tuple[int, int] | None:
    """Write the index file, and return what it covers; None where the disk refuses: the next start reads the
    segments instead."""
    try:
        save_columns(directory / INDEX_FILE, index.columns(), rows=index.rows(), entries=layout.table())
    except StorageError as error:
        log.warning("replay_index_not_written", reason=str(error))
        return None
    return layout.segments, index.total


def _load_index(path: Path) -> IndexFile:
    if not path.exists():
        return _NOTHING
    try:
        return load_index(path)
    except StorageError as error:  # an index says nothing that segments do not
        log.warning("replay_index_not_used", reason=str(error))
        return _NOTHING


def _columns_on_disk(directory: Path, entry: SegmentEntry) -> tuple[Columns | None, int, range]:
    """Return whose trajectories an entry holds, None if all are settled, how many, and their leases."""
    path = directory / entry.name
    if not entry.retired:
        columns = read_columns(path)
        return columns, len(columns), columns.lease_range
    found, pieces = load_retired(path, entry.first, entry.last)
    return found, sum(piece.rows for piece in pieces), hull(piece.leases for piece in pieces)
