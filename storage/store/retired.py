"""What is left of a segment that was retired: whose trajectories it held, or, once all are settled, how many.

Neighbours that are settled are one file, which names the segments as the archive has them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bus.errors import LostDataError, StorageError
from storage.disk.atomic_files import write_file
from storage.disk.file_errors import writing
from storage.store.index import Columns, load_columns, save_columns
from storage.store.layout import SegmentEntry, merged
from storage.store.segments import read_columns
from storage.store.settled import Settled


@dataclass(frozen=True)
class RetiredSegment:
    """A segment that was retired."""

    first: int
    last: int
    """Numbers that it covered."""
    rows: int
    leases: range
    """From the segment's lowest lease to its highest."""


def save_pieces(path: Path, pieces: Sequence[RetiredSegment]) -> None:
    """Replace `path` durably by these settled neighbours. Raises `StorageError` when the disk refuses."""
    content = [[p.first, p.last, p.rows, p.leases.start, p.leases.stop] for p in pieces]
    with writing(path):
        write_file(path, json.dumps({"pieces": content}).encode())


def load_retired(path: Path, first: int, last: int) -> tuple[Columns | None, list[RetiredSegment]]:
    """Return whose trajectories were retired, None if all are settled; and the pieces they were retired in.
    Raises `StorageError` when the file cannot be used."""
    try:
        with path.open("rb") as file:
            settled = file.read(1) == b"{"
            content = json.loads(b"{" + file.read()) if settled else None
        if content is None:
            columns, _ = load_columns(path)
            return columns, [RetiredSegment(first, last, len(columns), columns.lease_range)]
        return None, [
            RetiredSegment(a, b, rows, range(start, stop)) for a, b, rows, start, stop in content["pieces"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise LostDataError(f"{path} cannot be used ({error!r}): restore it") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be read ({error})") from error


@dataclass(frozen=True)
class Left:
    """What a segment leaves behind."""

    entry: SegmentEntry
    """What takes the place of the segment and of the retired neighbours that it swallows."""
    replaced: list[SegmentEntry]
    """The segment and those neighbours."""
    settled_leases: list[int]
    """Leases of its trajectories that are settled, each once."""


def write_retired(
    directory: Path, entries: Sequence[SegmentEntry], entry: SegmentEntry, settled: Settled
) -> Left:
    """Write the file that stands for one of a store's segments from now on, which is still there. Raises
    `StorageError` when the disk refuses, or a file cannot be used."""
    columns = read_columns(directory / entry.name)
    past = settled.which(columns.leases)
    leases: list[int] = np.unique(columns.leases[past]).tolist()
    if not past.all():
        retired = replace(entry, retired=True, size_bytes=0)
        save_columns(directory / retired.name, columns)
        return Left(retired, [entry], leases)
    run, pieces = [entry], [RetiredSegment(entry.first, entry.last, len(columns), entry.leases)]
    at = entries.index(entry)
    for other in reversed(entries[:at]):
        if not (found := _settled_pieces(directory, other, settled)):
            break
        run, pieces = [other, *run], [*found, *pieces]
    for other in entries[at + 1 :]:
        if not (found := _settled_pieces(directory, other, settled)):
            break
        run, pieces = [*run, other], [*pieces, *found]
    retired = replace(merged(run), retired=True)
    save_pieces(directory / retired.name, pieces)
    return Left(retired, run, leases)


def _settled_pieces(directory: Path, entry: SegmentEntry, settled: Settled) -> list[RetiredSegment]:
    if not entry.retired:
        return []
    columns, pieces = load_retired(directory / entry.name, entry.first, entry.last)
    return pieces if columns is None or settled.which(columns.leases).all() else []
