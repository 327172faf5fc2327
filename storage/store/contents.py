"""What a store holds: which groups, in which rows, in which segments; and reads of them."""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bus.errors import LostDataError, StorageError
from bus.trajectory import Trajectory
from storage.store.complete_groups import CompleteGroups
from storage.store.image_blobs import KnownImages
from storage.store.index import RowIndex
from storage.store.layout import SegmentEntry, SegmentLayout
from storage.store.loading import Loaded
from storage.store.segments import Segment
from storage.store.settled import Settled

Placed = Sequence[tuple[SegmentEntry, int]]
"""Every entry of a store and its first row."""
_LEASE, _SAMPLE, _SIZE = 2, 3, 4
"""Columns of a segment's rows."""
Torn = dict[SegmentEntry, LostDataError]
"""Segments that cannot be read, and why."""


def find_rows(
    placed: Placed, mapped: Callable[[SegmentEntry], Segment], lease_ids: Iterable[int]
) -> tuple[dict[int, list[tuple[int, int, int]]], Torn]:
    """Return sample, group size and row of each trajectory of these groups that is here, by sample. What is
    torn may hold more of them, and is told of; raises `StorageError` when the disk refuses."""
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
    """Return the leases of all groups whose trajectories are all in the segments, ascending. `closed_sizes`
    says how many those are of groups that were closed short."""
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


class StoreContents:
    """The segments of one store and the groups in them.

    Whoever changes or reads `layout`, `index`, `groups` or `settled` holds `mutex`, which is never held while
    the disk works. Whoever reads mapped segments or replaces them holds `reading`, and takes it first."""

    def __init__(self, directory: Path, *, writable: bool) -> None:
        self.layout = SegmentLayout(directory)
        self.index = RowIndex()
        self.groups = CompleteGroups(directory, writable=writable)
        self.settled = Settled()
        self.mutex = threading.Lock()
        self.reading = threading.RLock()

    def become(self, loaded: Loaded) -> None:
        """Hold what was found in the directory."""
        with self.reading, self.mutex:
            self.layout.close()
            self.layout, self.index, self.settled = loaded.layout, loaded.index, loaded.settled
            self.groups.load(loaded.index, loaded.settled)

    def close(self) -> None:
        with self.reading, self.mutex:
            self.layout.close()
        self.groups.close()

    def completed(self) -> list[int]:
        """Return the leases of all complete groups; settled ones as far as their segments are here."""
        with self.reading:
            with self.mutex:
                order, settled, placed = self.groups.order, self.settled, self.layout.placed()
            if not settled.through:
                return order
            found = complete_leases(placed, self.layout.mapped, self.groups.closed_sizes())
        past = set(found[settled.which(found)].tolist())
        here = [lease_id for lease_id in order if lease_id in past or not settled.covers(lease_id)]
        return [*sorted(past.difference(here)), *here]

    def stored(self, lease_id: int) -> list[int]:
        """Return the rows of what is here of a group, complete or not, by sample."""
        with self.mutex:
            if not self.groups.is_forgotten(lease_id):
                return self.index.stored(lease_id)
        found, torn = self._find([lease_id])
        for error in torn.values():
            raise error
        return [row for *_, row in found[lease_id]]

    def rows(self, leases: Sequence[int]) -> list[int]:
        """Return the rows of complete groups, each by sample; settled ones are looked up in the segments.
        Raises `StorageError` for a group that is unknown, incomplete or, if it is settled, retired."""
        with self.mutex:
            past = {lease for lease in leases if self.groups.is_forgotten(lease)}
            rows = {lease: self.groups.rows(lease) for lease in leases if lease not in past}
        if past:
            rows |= self._rows_of_settled(past)
        return [row for lease in leases for row in rows[lease]]

    def _rows_of_settled(self, leases: Collection[int]) -> dict[int, list[int]]:
        (found, torn), closed_sizes = self._find(leases), self.groups.closed_sizes(leases)
        with self.mutex:
            placed = self.layout.placed()
        for lease, samples in found.items():
            refuse_missing(placed, torn, lease, samples, closed_size=closed_sizes.get(lease))
        return {lease: [row for *_, row in samples] for lease, samples in found.items()}

    def _find(self, leases: Iterable[int]) -> tuple[dict[int, list[tuple[int, int, int]]], Torn]:
        with self.reading:
            with self.mutex:
                placed = self.layout.placed()
            return find_rows(placed, self.layout.mapped, leases)

    def read_rows(self, rows: Sequence[int]) -> list[Trajectory]:
        """Return the trajectories in these rows, with rewards that came later. `reading` is held.

        They are read in the order in which they lie, so that each segment is opened once. Raises
        `LostDataError` where a row holds another trajectory than the index says: its segment has been put
        under another number."""
        with self.mutex:
            keys = {row: self.index.key_of(row) for row in rows}
        found: dict[int, Trajectory] = {}
        known: KnownImages = {}
        held = range(0)  # rows of the segment that the last one lay in, where the next one mostly lies
        for row in sorted(rows):
            if row not in held:
                segment, held = self.layout.segment_of(row)
            trajectory = segment.trajectory(row - held.start, known=known)
            key = keys[row]
            if key is not None and key != (trajectory.lease_id, trajectory.sample):
                raise LostDataError(
                    f"{segment.path} holds {trajectory.trajectory_id} in row {row - held.start}, where the "
                    f"index has sample {key[1]} of lease {key[0]}: restore the segment of that name"
                )
            found[row] = self._rewarded(trajectory) if trajectory.reward_due else trajectory
        return [found[row] for row in rows]

    def _rewarded(self, trajectory: Trajectory) -> Trajectory:
        given = self.groups.rewards.reward_of(trajectory.lease_id, trajectory.sample)
        if given is None:
            return trajectory
        return replace(trajectory, reward=given.reward, reward_source=given.source, reward_due=False)
