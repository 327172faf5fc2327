"""One shard's trajectories on disk: immutable segments, an index of groups in memory, reads by mapping."""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import Self

import numpy as np
import structlog
from numpy.typing import NDArray

from bus.errors import SchemaError, StorageError
from bus.messages import RewardGiven
from bus.topology import by_shard
from bus.trajectory import Trajectory
from storage.account.records import DROPPED, AccountRecord, AccountWriter, Copy, DropReason, Kind
from storage.disk.atomic_files import lock_directory, make_directory, remove, remove_leftovers
from storage.store.archive import archive_segment
from storage.store.contents import StoreContents
from storage.store.index import LARGEST_GROUP
from storage.store.kept_turns import KeptTurns
from storage.store.late_rewards import LateReward
from storage.store.layout import SegmentEntry, choose_merge, find_entries, merged
from storage.store.loading import load_store, save_index
from storage.store.retired import write_retired
from storage.store.segments import merge_segments, read_columns, write_segment
from storage.store.settled import Settled, save_settled


@dataclass(frozen=True)
class Arrivals:
    """What became of trajectories that arrived together."""

    fresh: list[Trajectory]
    """Trajectories to store, each once."""
    dropped: list[tuple[Trajectory, DropReason]]
    late_siblings: int
    """Number of those that their group was closed without."""


def sort_arrivals(held: StoreContents, trajectories: Sequence[Trajectory]) -> Arrivals:
    """Tell trajectories that are to be stored from others. Raises `SchemaError` if siblings disagree on
    `group_size`."""
    fresh: dict[tuple[int, int], Trajectory] = {}
    dropped: list[tuple[Trajectory, DropReason]] = []
    sizes: dict[int, int] = {}
    late = 0
    for t in trajectories:
        if held.groups.is_forgotten(t.lease_id):  # delivered once more, or rejected: no step will have it
            dropped.append((t, DropReason.SETTLED))
            continue
        stored = held.index.holds(t.lease_id, t.sample)
        if held.groups.is_closed(t.lease_id):
            late += not stored
            dropped.append((t, DropReason.CLOSED))
            continue
        size = held.index.group_size(t.lease_id) or sizes.setdefault(t.lease_id, t.group_size)
        if t.group_size != size:
            raise _misfit(t, f"its group has {size} samples, it says {t.group_size}")
        if size > LARGEST_GROUP:
            raise _misfit(t, f"a group of {size} samples cannot be stored")
        if stored or fresh.setdefault((t.lease_id, t.sample), t) is not t:
            dropped.append((t, DropReason.HELD))
    return Arrivals(list(fresh.values()), dropped, late)


def _misfit(trajectory: Trajectory, why: str) -> SchemaError:
    reason = f"{trajectory.trajectory_id}: {why}"
    return SchemaError(reason, kind="group_size", actor=trajectory.actor)


log = structlog.get_logger()
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
        self._indexed = 0, 0
        """Segments and rows in the index file."""
        self.late_siblings = 0
        """Trajectories not stored, since their groups had been closed without them; from the opening on."""
        self.run = ""
        """Identity of the run whose segments were here when it opened; empty where none says so."""
        self._dropped = AccountWriter(directory / DROPPED, "shard")
        """Account of what arrived and was not stored."""
        self._held = StoreContents(directory, writable=writable)
        self._writing = threading.Lock()  # held while groups become complete: their order is durable
        self._housekeeping = threading.Lock()
        self._lock: BufferedRandom | None = lock_directory(directory) if writable else None

    @classmethod
    def open(cls, directory: Path, *, writable: bool = True) -> Self:
        """Read the index of `directory`, made if missing; a writer also clears what a crash left over. Raises
        `StorageError` naming a torn or foreign segment, or when another writer has it open."""
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
        """Return the leases in the order in which their groups became complete; do not modify the list.
        Settled ones come first, as the segments that are here hold them, in the order of their leases."""
        return self._held.completed()

    @property
    def completions(self) -> int:
        """Return the number of groups that ever became complete."""
        with self._held.mutex:
            return self._held.groups.forgotten + len(self._held.groups.order)

    @property
    def youngest(self) -> int:
        """Return the highest lease of a complete group, -1 before the first."""
        return self._held.groups.youngest

    @property
    def settled(self) -> Settled:
        """Return what is noted of the leases whose groups this store has let go."""
        with self._held.mutex:
            return self._held.settled

    def completed_after(self, after: int, most: int) -> list[int]:
        """Return the leases of the groups that became complete after the first `after` ones, in their order.
        Raises `StorageError` when that is longer ago than the dispatcher has said that it has seen."""
        with self._held.mutex:
            begin = after - self._held.groups.forgotten
            if begin < 0:
                raise StorageError(
                    f"the dispatcher has seen {after} complete groups, and by what {self.directory} noted "
                    f"{self._held.groups.forgotten}: restore the newer ledger"
                )
            return self._held.groups.order[begin : begin + most]

    @property
    def trajectories(self) -> int:
        """Trajectories stored ever, retired ones included."""
        return self._held.index.total

    @property
    def closed_short(self) -> int:
        """Return the number of groups that were closed though siblings were missing."""
        return self._held.groups.closed_short

    @property
    def turns(self) -> KeptTurns:
        """Return the turns of rollouts that have not ended."""
        return self._held.groups.turns

    @property
    def size_bytes(self) -> int:
        with self._held.mutex:
            return sum(entry.size_bytes for entry in self._held.layout.entries)

    @property
    def entries(self) -> tuple[SegmentEntry, ...]:
        with self._held.mutex:
            return tuple(self._held.layout.entries)

    def tokens_of(self, lease_id: int) -> int:
        with self._held.mutex:
            return self._held.index.tokens(lease_id)

    def leases_of(self, entry: SegmentEntry) -> NDArray[np.int64]:
        """Return the leases of the trajectories that an entry which is not retired has, each once."""
        return np.unique(read_columns(self._held.layout.path(entry)).leases)

    @property
    def rows_in_memory(self) -> int:
        """Return the number of trajectories that are known without asking the disk."""
        return len(self._held.index)

    # --- trajectories ---

    def append(self, trajectories: Sequence[Trajectory]) -> list[int]:
        """Store what is not stored yet as one new segment; return the leases whose groups are complete now.

        On return they are on the disk. Otherwise nothing is stored: the disk refuses (`StorageError`), or
        siblings disagree on their group's size, where a retry cannot help (`SchemaError`)."""
        self._refuse_reader()
        with self._writing:
            return self._append(trajectories)

    def lacks(self, trajectories: Sequence[Trajectory]) -> bool:
        """Return whether `append` would store any of these. Raises `SchemaError` as it does."""
        return bool(sort_arrivals(self._held, trajectories).fresh)

    def close_short(self, lease_ids: Sequence[int], *, fewest: int) -> list[int]:
        """Count these groups as complete, durably, where so many siblings are stored; return those. What
        comes of them later is dropped. Raises `StorageError` when the disk refuses."""
        self._refuse_reader()
        with self._writing:
            return self._held.groups.close_short(lease_ids, fewest=fewest)

    def _append(self, trajectories: Sequence[Trajectory]) -> list[int]:
        fresh = self._fresh(trajectories)
        full = self._store(fresh) if fresh else []
        completed = self._held.groups.on_stored(full)
        segments, rows = self._indexed
        late, known = self._held.index.total - rows, len(self._held.index)
        if self._held.layout.segments - segments >= UNINDEXED_SEGMENTS and late >= (known - late) // 4:
            self._save_index()
        return completed

    def _fresh(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the trajectories to store, each once; the account says which are not stored, and why. Raises
        `SchemaError` if siblings disagree on `group_size`."""
        arrived = sort_arrivals(self._held, trajectories)
        self._dropped.add([AccountRecord(Kind.DROPPED, Copy.of(t), reason) for t, reason in arrived.dropped])
        self.late_siblings += arrived.late_siblings
        return arrived.fresh

    def _store(self, fresh: Sequence[Trajectory]) -> list[int]:
        keys = [(t.lease_id, t.sample) for t in fresh]
        due = [key for key, t in zip(keys, fresh, strict=True) if t.reward_due]
        self._held.groups.rewards.expect(due, stored=keys)
        number = self._held.layout.segments
        written = write_segment(self._held.layout.path(SegmentEntry(number, number)), fresh)
        leases = [t.lease_id for t in fresh]
        entry = SegmentEntry(
            number,
            number,
            size_bytes=written.size_bytes,
            written_s=written.written_s,
            leases=range(min(leases), max(leases) + 1),
        )
        with self._held.mutex:
            full = [
                t.lease_id
                for t in fresh
                if self._held.index.add(t.lease_id, t.sample, t.group_size, len(t.token_ids))
            ]
            self._held.layout.add(entry, self._held.index.total)
        return full

    def give(self, rewards: Sequence[RewardGiven]) -> list[int]:
        """Keep rewards that come later than their trajectories; return the leases of completed groups.

        On return they are on the disk. The first reward of a trajectory is the one that counts. Otherwise
        nothing is kept: the disk refuses (`StorageError`), or one of them is for a trajectory that its group
        cannot have or that has its reward, where a retry cannot help (`SchemaError`)."""
        with self._writing:
            self._refuse_reader()
            completed, counts = self._held.groups.give(rewards)
            self.rewards += counts
            return completed

    def full(self, lease_ids: Iterable[int]) -> list[int]:
        """Return the groups that no trajectory will be added to; rewards may still be due."""
        with self._held.mutex:
            return [lease_id for lease_id in lease_ids if self._held.groups.is_full(lease_id)]

    def read(self, lease_ids: Iterable[int]) -> list[Trajectory]:
        """Return the trajectories of these complete groups, each group in the order of its samples.

        Their arrays are views of mapped files, one descriptor a segment, which a view keeps mapped. Raises
        `StorageError` for a group that is unknown, incomplete or retired, or whose bytes changed."""
        leases = list(lease_ids)
        found = self._read(lambda: self._held.rows(leases))
        if due := [trajectory for trajectory in found if trajectory.reward_due]:
            raise StorageError(
                f"group of lease {due[0].lease_id} cannot be read: the reward of "
                f"{due[0].trajectory_id} is due"
            )
        return found

    def late_reward(self, lease_id: int, sample: int) -> LateReward | None:
        """Return the reward that a trajectory was given after it was stored, or None."""
        return self._held.groups.rewards.reward_of(lease_id, sample)

    def locate(self, lease_ids: Iterable[int]) -> list[tuple[SegmentEntry, int]]:
        """Return entry and row of each trajectory of these complete groups, in the order of `read`. Raises
        `StorageError` for a group that is unknown, incomplete or retired, or had rewards due."""
        leases = list(lease_ids)
        if late := [lease_id for lease_id in leases if self._held.groups.is_late(lease_id)]:
            raise StorageError(
                f"group of lease {late[0]} has rewards that lie apart from it: read it instead"
            )
        rows = self._held.rows(leases)
        with self._held.mutex:
            return [self._held.layout.place_of(row) for row in rows]

    def trajectories_of(self, lease_id: int) -> list[Trajectory]:
        """Return what is stored of a group, complete or not, by sample; some rewards may be due."""
        return self._read(lambda: self._held.stored(lease_id))

    # --- housekeeping ---

    def settle(self, through: int, unsettled: Collection[int], *, seen: int) -> bool:
        """Forget the groups of leases below `through` but for the `unsettled` ones; return whether any went.

        Nothing of them is stored from now on, across any crash. Turns of such leases go even where no group
        does: a lease that was rejected has none. `seen` is how many complete groups the dispatcher has seen.
        Raises `StorageError` when the disk refuses; then no group is forgotten."""
        self._refuse_reader()
        with self._housekeeping, self._writing:
            self._held.groups.remove_turns(through, unsettled)
            noted = self._held.groups.note(through, unsettled, seen=seen)
            if noted is None or not self._held.index.settled(noted):
                return False
            save_settled(self.directory, noted)
            with self._held.mutex:
                self._held.groups.forget(noted)
                self._held.settled = noted
            self._held.groups.remove_places()
        return True

    def compact(self) -> bool:
        """Merge one run of small neighbouring segments, if any is due; return whether one was. Raises
        `StorageError` when the disk refuses; then all is as it was."""
        with self._housekeeping:
            self._refuse_reader()
            run = choose_merge(self.entries)
            if not run:
                return False
            written = merge_segments(
                self._held.layout.path(merged(run)), [self._held.layout.path(entry) for entry in run]
            )
            with self._held.reading, self._held.mutex:
                self._held.layout.switch(run, merged(run, written.size_bytes))
            for entry in run:
                remove(self._held.layout.path(entry))
        log.info("segments_merged", store=str(self.directory), segments=len(run), bytes=written.size_bytes)
        return True

    def retire(self, entry: SegmentEntry, archive: str | None) -> None:
        """Put the segment of `entry` into the archive, if there is one, and remove it here.

        Its groups stay known, and are not stored again; `storage.archive.restore` brings them back.
        Raises `StorageError` when the archive or the disk refuses; then the segment is still here."""
        with self._housekeeping:
            self._refuse_reader()
            path = self._held.layout.path(entry)
            if archive is not None:
                archive_segment(path, archive)
            left = write_retired(self.directory, self.entries, entry, self._held.settled)
            with self._held.reading, self._held.mutex:
                self._held.layout.switch(left.replaced, left.entry)
            for old in left.replaced:
                remove(self._held.layout.path(old))
            if archive is None:
                self._held.groups.rewards.remove(left.settled_leases)
        log.info("segment_retired", segment=str(path), bytes=entry.size_bytes, archive=archive)

    def close(self) -> None:
        """Unmap every file and let another writer in. Trajectories already read stay valid."""
        with self._housekeeping:  # waits for what another thread is in the middle of
            held = self._held.layout.segments, self._held.index.total
            if self._lock is not None and self._indexed != held:
                self._save_index()
            self._dropped.close()
            self._release()

    def _refuse_reader(self) -> None:
        if self._lock is None:
            raise StorageError(f"{self.directory} was opened for reading")

    def _read(self, find: Callable[[], list[int]]) -> list[Trajectory]:
        try:
            return self._read_once(find)
        except StorageError:
            if self._lock is not None:
                raise
        self._scan()  # the writer has stored, merged or retired since this reader looked
        return self._read_once(find)

    def _read_once(self, find: Callable[[], list[int]]) -> list[Trajectory]:
        with self._held.reading:
            return self._held.read_rows(find())

    def _release(self) -> None:
        self._held.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # --- the directory ---

    def _scan(self) -> None:
        if self._lock is not None:
            remove_leftovers(self.directory)
            entries, replaced = find_entries(self.directory)
            for entry in replaced:
                remove(self._held.layout.path(entry))
            self._load(entries)
            self._held.groups.on_stored([])
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
        loaded = load_store(self.directory, entries)
        self._held.become(loaded)
        self._indexed = loaded.indexed
        self.run = loaded.run

    def _save_index(self) -> None:
        self._indexed = save_index(self.directory, self._held.index, self._held.layout) or self._indexed


def read_groups(stores: Sequence[ReplayStore], lease_ids: Sequence[int]) -> list[list[Trajectory]]:
    """Return these complete groups in this order, read from the run's shards in one call each. All of them
    are in memory, or mapped, together. Raises `StorageError` as `ReplayStore.read`."""
    groups: defaultdict[int, list[Trajectory]] = defaultdict(list)
    for shard, leases in by_shard(dict.fromkeys(lease_ids), len(stores)).items():
        for trajectory in stores[shard].read(leases):
            groups[trajectory.lease_id].append(trajectory)
    return [groups[lease_id] for lease_id in lease_ids]
