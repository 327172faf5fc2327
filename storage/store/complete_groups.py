"""Decides which groups of a shard are complete, and keeps the order in which they became so.

A group is full when all its trajectories are stored, or it was closed short, without the missing ones. It is
complete when it is full and no reward of it is due.

The order of completion is how the dispatcher knows what it has heard of, so it is the same after a restart.
It follows from the order in which trajectories were stored, but for groups that were closed or had a reward
due: their places in it are kept in the database.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path

import structlog

from bus.errors import SchemaError, StorageError
from bus.messages import RewardGiven
from storage.store.group_database import GroupDatabase
from storage.store.index import RowIndex
from storage.store.late_rewards import Key, LateRewards

log = structlog.get_logger()


class CompleteGroups:
    """The completeness of one store's groups. Changes come one at a time, questions from any thread."""

    def __init__(self, directory: Path, *, writable: bool) -> None:
        self.order: list[int] = []
        """Leases in the order in which their groups became complete; it only grows. Do not modify."""
        self._directory = directory
        self._database = GroupDatabase(directory, writable=writable)
        self.rewards = LateRewards(self._database)
        self._index = RowIndex()
        self._closed: set[int] = set()
        self._unplaced: list[int] = []
        """Complete groups whose place could not be kept yet, since the disk refused."""

    def load(self, index: RowIndex) -> None:
        """Read what the database says of the groups in `index`. Raises `StorageError` if it is damaged."""
        self.rewards.load()
        with self._database.reading() as sql:
            query = "SELECT lease_id, place, closed FROM places ORDER BY place"
            kept = [] if sql is None else sql.execute(query).fetchall()
        places = {lease_id: place for lease_id, place, _ in kept}
        full = index.full_groups()
        regular = [n for n in full if n not in places and not self.rewards.is_late(n)]
        self._index, self._closed = index, {lease_id for lease_id, _, closed in kept if closed}
        self.order = in_order(regular, places)
        # A crash came between the last trajectory of these and their place.
        self._unplaced = [
            n for n in full if n not in places and self.rewards.is_late(n) and not self.rewards.is_missing(n)
        ]

    def close(self) -> None:
        """Let the database go."""
        self._database.close()

    # --- questions ---

    @property
    def closed_short(self) -> int:
        """Return the number of groups that were closed though trajectories were missing."""
        return len(self._closed)

    def is_closed(self, lease_id: int) -> bool:
        """Tell whether the group was closed short, and takes no more trajectories."""
        return lease_id in self._closed

    def is_full(self, lease_id: int) -> bool:
        """Tell whether all trajectories that the group will ever have are stored; rewards may be due."""
        return lease_id in self._closed or self._index.holds_all(lease_id)

    def is_complete(self, lease_id: int) -> bool:
        """Tell whether the group is full and has all its rewards."""
        return self.is_full(lease_id) and not self.rewards.is_missing(lease_id)

    def rows(self, lease_id: int) -> list[int]:
        """Return the rows of a full group, by sample. Raises `StorageError` for any other."""
        if not self.is_full(lease_id):
            what = "nothing of it is"
            if size := self._index.group_size(lease_id):
                what = f"{self._index.samples_stored(lease_id)} of its {size} trajectories are"
            raise StorageError(f"group of lease {lease_id} cannot be read: {what} stored")
        return self._index.stored(lease_id)

    # --- changes, each durable on return ---

    def on_stored(self, full: Iterable[int]) -> list[int]:
        """Take note that these groups became full, in this order; return those that are complete now.

        Raises `StorageError` when the disk refuses; the next call makes up for it.
        """
        self._unplaced += [lease_id for lease_id in full if not self.rewards.is_missing(lease_id)]
        completed = list(self._unplaced)
        self._complete(completed)
        self._unplaced.clear()
        return completed

    def close_short(self, lease_ids: Sequence[int], *, fewest: int) -> list[int]:
        """Close those groups that have at least `fewest` trajectories and no reward due.

        Returns those of `lease_ids` that are complete now. Raises `StorageError` when the disk refuses.
        """
        short = [
            lease_id
            for lease_id in dict.fromkeys(lease_ids)
            if not self.is_full(lease_id)
            and not self.rewards.is_missing(lease_id)
            and self._index.samples_stored(lease_id) >= fewest
        ]
        self._complete(short, closed=frozenset(short))
        if short:
            log.info("groups_closed_short", store=str(self._directory), lease_ids=short)
        return [lease_id for lease_id in lease_ids if self.is_complete(lease_id)]

    def give(self, rewards: Sequence[RewardGiven]) -> tuple[list[int], Counter[str]]:
        """Keep rewards that come apart from their trajectories, the first of each.

        Returns the groups that are complete now, and counts as of `LateRewards.first_of`. Raises
        `StorageError` when the disk refuses, and `SchemaError` for a trajectory that its group cannot have or
        that has its reward; then nothing is kept.
        """
        for given in rewards:
            self._refuse_not_due(given)
        fresh, counts = self.rewards.first_of(rewards)
        completed = [n for n in self.rewards.settled_by(fresh) if self.is_full(n)]
        self._complete(completed, rewards=fresh)
        return completed, counts

    def _refuse_not_due(self, given: RewardGiven) -> None:
        lease_id, sample = given.lease_id, given.sample
        size = self._index.group_size(lease_id)
        if size is not None and sample >= size:
            raise SchemaError(f"{given.trajectory_id}: its group has {size} samples", kind="reward")
        if self._index.holds(lease_id, sample) and not self.rewards.is_due(lease_id, sample):
            raise SchemaError(f"{given.trajectory_id}: it was stored with its reward", kind="reward")

    def _complete(
        self,
        lease_ids: Sequence[int],
        *,
        closed: frozenset[int] = frozenset(),
        rewards: Mapping[Key, RewardGiven] | None = None,
    ) -> None:
        """Put these groups at the end of the order; keep their places where no restart would find them."""
        rewards = rewards or {}
        places = [
            (lease_id, place, lease_id in closed)
            for place, lease_id in enumerate(lease_ids, len(self.order))
            if lease_id in closed or self.rewards.is_late(lease_id)
        ]
        if places or rewards:
            with self._database.transaction() as sql:
                self.rewards.insert(sql, rewards)
                sql.executemany("INSERT INTO places VALUES (?, ?, ?)", places)
        self.rewards.forget(rewards)
        self._closed |= closed
        self.order += lease_ids


def in_order(regular: Iterable[int], places: Mapping[int, int]) -> list[int]:
    """Put the leases of `places`, which are in the order of their places, among the `regular` ones."""
    others = iter(regular)
    ordered: list[int] = []
    for lease_id, place in places.items():
        ordered += islice(others, max(0, place - len(ordered)))
        ordered.append(lease_id)
    return [*ordered, *others]
