"""Finds settled groups in the segments: nothing of them is in memory but which leases each segment spans."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from bus.errors import LostDataError, StorageError
from storage.store.layout import SegmentEntry
from storage.store.segments import Segment

Placed = Sequence[tuple[SegmentEntry, int]]
"""Every entry of a store and its first row."""
_LEASE, _SAMPLE, _SIZE = 2, 3, 4
"""Columns of a segment's rows."""
Torn = dict[SegmentEntry, LostDataError]
"""Segments that cannot be read, and why."""


def find_rows(
    placed: Placed, mapped: Callable[[SegmentEntry], Segment], lease_ids: Iterable[int]
) -> tuple[dict[int, list[tuple[int, int, int]]], Torn]:
    """Return sample, group size and row of each trajectory of these groups that is here, by sample.

    What is torn may hold more of them, and is told of; raises `StorageError` when the disk refuses."""
    wanted = np.array(sorted(set(lease_ids)), np.int64)
    found: dict[int, list[tuple[int, int, int]]] = {int(lease_id): [] for lease_id in wanted}
    torn: Torn = {}
    for entry, begin in placed:
        if entry.retired or not _any_within(wanted, entry.leases):
            continue
        try:
            rows = mapped(entry).rows
        except LostDataError as error:
            torn[entry] = error
            continue
        for at in np.flatnonzero(np.isin(rows[:, _LEASE], wanted)).tolist():
            row = rows[at].tolist()
            found[row[_LEASE]].append((row[_SAMPLE], row[_SIZE], begin + at))
    return {lease_id: sorted(samples) for lease_id, samples in found.items()}, torn


def refuse_missing(
    placed: Placed, torn: Torn, lease_id: int, found: Sequence[tuple[int, int, int]],
    *, closed_size: int | None,
) -> None:  # fmt: skip
    """Raise `StorageError` unless a settled group is here whole, or as it was when it was closed short.

    `closed_size` is how many trajectories it had then, None for one that was not closed short."""
    if found and len(found) >= (closed_size or found[0][1]):
        return
    for entry, error in torn.items():
        if lease_id in entry.leases:
            raise error
    for entry, _ in placed:
        if entry.retired and lease_id in entry.leases:
            raise LostDataError(
                f"{entry.name} was retired to save space, and what it held of the group of lease {lease_id} "
                "with it: restore its segments from the archive"
            )
    what = "nothing of it is"
    if found:
        what = f"{len(found)} of its {closed_size or found[0][1]} trajectories are"
    raise StorageError(f"group of lease {lease_id} cannot be read: {what} stored")


def complete_leases(
    placed: Placed, mapped: Callable[[SegmentEntry], Segment], closed_sizes: Mapping[int, int]
) -> NDArray[np.int64]:
    """Return the leases of all groups whose trajectories are all in the segments, ascending.

    `closed_sizes` says how many those are of groups that were closed short."""
    parts = [mapped(entry).rows[:, [_LEASE, _SIZE]].copy() for entry, _ in placed if not entry.retired]
    rows = np.concatenate([np.empty((0, 2), np.int64), *parts])
    leases, first, counts = np.unique(rows[:, 0], return_index=True, return_counts=True)
    sizes = rows[first, 1]
    closed = np.isin(leases, np.fromiter(closed_sizes, np.int64))
    sizes[closed] = [closed_sizes[lease_id] for lease_id in leases[closed].tolist()]
    whole = counts >= sizes
    complete: NDArray[np.int64] = leases[whole]
    return complete


def _any_within(ordered: NDArray[np.int64], leases: range) -> bool:
    at = int(np.searchsorted(ordered, leases.start))
    return at < len(ordered) and int(ordered[at]) < leases.stop
