"""Decides which groups of a shard are complete, and keeps the order in which they became so.

A group is full when all its trajectories are stored, or it was closed short, without the missing ones. It is
complete when it is full and no reward of it is due.

The order of completion is how the dispatcher knows what it has heard of, so it is the same after a restart.
It follows from the order in which trajectories were stored, but for groups that were closed or had a reward
due: their places in it are kept in the database."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, takewhile
from pathlib import Path

import structlog

from bus.errors import SchemaError, StorageError
from bus.messages import RewardGiven
from storage.store.group_database import GroupDatabase
from storage.store.index import RowIndex
from storage.store.kept_turns import KeptTurns
from storage.store.late_rewards import Key, LateRewards
from storage.store.settled import Settled, settle_more

log = structlog.get_logger()
LAST_LEASE = (1 << 63) - 1


class CompleteGroups:
    """The completeness of one store's groups. Changes come one at a time, questions from any thread."""

    def __init__(self, directory: Path, *, writable: bool) -> None:
        self.order: list[int] = []
        """Leases in the order in which their groups became complete, without the first `forgotten` ones."""
        self.forgotten = 0
        self.youngest = -1
        """The highest lease of a complete group."""
        self.closed_short = 0
        """Groups that were closed though trajectories were missing."""
        self._directory = directory
        self._database = GroupDatabase(directory, writable=writable)
        self.rewards = LateRewards(self._database)
        self.turns = KeptTurns(self._database, is_late=self.is_full)
        """Turns of rollouts of groups that are not full."""
        self._index = RowIndex()
        self._settled = Settled()
        self._closed: set[int] = set()
        self._unplaced: list[int] = []
        """Complete groups whose place could not be kept yet, since the disk refused."""

    def load(self, index: RowIndex, settled: Settled) -> None:
        """Read what the database says of the groups in `index`. Raises `StorageError` if it is damaged."""
        self.rewards.load(settled)
        self.turns.load()
        noted = settled.forgotten + len(settled.order)
        with self._database.reading() as sql:
            query = "SELECT lease_id, place FROM places WHERE place >= ? ORDER BY place"
            kept = [] if sql is None else sql.execute(query, (noted,)).fetchall()
        closed = self.closed_sizes()
        places = {lease_id: place - noted for lease_id, place in kept}
        full = index.full_groups(from_row=settled.rows)
        regular = [n for n in full if n not in places and not self.rewards.is_late(n)]
        self._index, self._settled = index, settled
        self._closed, self.closed_short = {n for n in closed if not settled.covers(n)}, len(closed)
        self.order, self.forgotten = [*settled.order, *in_order(regular, places)], settled.forgotten
        self.youngest = max([settled.youngest, *self.order])
        # A crash came between the last trajectory of these and their place.
        self._unplaced = [
            n for n in full if n not in places and self.rewards.is_late(n) and not self.rewards.is_missing(n)
        ]

    def close(self) -> None:
        self._database.close()

    # --- questions ---

    def closed_sizes(self, leases: Collection[int] | None = None) -> dict[int, int]:
        """Return the groups that were closed short and how many trajectories each had, by asking the disk. Of
        all, or at least of `leases`. Builds that did not count them noted 1."""
        first, last = (0, LAST_LEASE) if leases is None else (min(leases, default=0), max(leases, default=0))
        with self._database.reading() as sql:
            query = "SELECT lease_id, closed FROM places WHERE closed AND lease_id BETWEEN ? AND ?"
            return {} if sql is None else dict(sql.execute(query, (first, last)).fetchall())

    def is_forgotten(self, lease_id: int) -> bool:
        """Tell whether a group is settled, and known to the disk alone."""
        return self._settled.covers(lease_id) and lease_id not in self._index

    def is_late(self, lease_id: int) -> bool:
        """Tell whether a reward of this group was due when it was stored; the disk may be asked."""
        return self.rewards.is_late(lease_id) or (
            self.is_forgotten(lease_id) and self.rewards.was_late(lease_id)
        )

    def is_closed(self, lease_id: int) -> bool:
        """Tell whether the group was closed short, and takes no more trajectories."""
        return lease_id in self._closed

    def is_full(self, lease_id: int) -> bool:
        """Tell whether all trajectories that the group will ever have are stored; rewards may be due."""
        return lease_id in self._closed or self._index.holds_all(lease_id) or self.is_forgotten(lease_id)

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
        """Take note that these groups became full, in this order; return those that are complete now. Raises
        `StorageError` when the disk refuses; the next call makes up for it."""
        full = list(full)
        self._unplaced += [lease_id for lease_id in full if not self.rewards.is_missing(lease_id)]
        completed = list(self._unplaced)
        self._complete(completed)
        self._unplaced.clear()
        self.turns.remove(full, reason="completed")
        return completed

    def close_short(self, lease_ids: Sequence[int], *, fewest: int) -> list[int]:
        """Close the groups that have at least `fewest` trajectories and no reward due. Returns those of
        `lease_ids` that are complete now. Raises `StorageError` when the disk refuses."""
        short = [
            lease_id
            for lease_id in dict.fromkeys(lease_ids)
            if not self.is_full(lease_id)
            and not self.rewards.is_missing(lease_id)
            and self._index.samples_stored(lease_id) >= fewest
        ]
        self._complete(short, closed=frozenset(short))
        self.turns.remove(short, reason="expired")
        if short:
            log.info("groups_closed_short", store=str(self._directory), lease_ids=short)
        return [lease_id for lease_id in lease_ids if self.is_complete(lease_id)]

    def give(self, rewards: Sequence[RewardGiven]) -> tuple[list[int], Counter[str]]:
        """Keep rewards that come apart from their trajectories, the first of each.

        Returns the groups that are complete now, and counts as of `LateRewards.first_of`. Raises
        `StorageError` when the disk refuses, and `SchemaError` for a trajectory that its group cannot have or
        that has its reward; then nothing is kept."""
        for given in rewards:
            if not self.is_forgotten(given.lease_id):
                self._refuse_not_due(given)
        fresh, counts = self.rewards.first_of(rewards)
        too_late = [key for key in fresh if self.is_forgotten(key[0])]
        for key in too_late:  # nobody will read these: the group was rejected
            del fresh[key]
        counts.update({"taken": -len(too_late), "too_late": len(too_late)} if too_late else {})
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
            (lease_id, place, self._index.samples_stored(lease_id) if lease_id in closed else 0)
            for place, lease_id in enumerate(lease_ids, self.forgotten + len(self.order))
            if lease_id in closed or self.rewards.is_late(lease_id)
        ]
        if places or rewards:
            with self._database.transaction() as sql:
                self.rewards.insert(sql, rewards)
                sql.executemany("INSERT INTO places VALUES (?, ?, ?)", places)
        self.rewards.forget(rewards)
        self._closed |= closed
        self.closed_short += len(closed)
        self.order += lease_ids
        self.youngest = max([self.youngest, *lease_ids])

    # --- settled groups ---

    def note(self, through: int, unsettled: Iterable[int], *, seen: int) -> Settled | None:
        """Return what to note of these settled leases; None while the disk lacks places of groups.

        Args:
            through: leases below this one are settled, but for
            unsettled: these.
            seen: complete groups that the dispatcher has seen, the first of the order."""
        if self._unplaced:
            return None
        new = settle_more(self._settled, through, unsettled)
        past = takewhile(new.covers, self.order[: max(0, seen - self.forgotten)])
        gone = sum(1 for _ in past)
        return replace(
            new,
            rows=self._index.total,
            forgotten=self.forgotten + gone,
            order=tuple(self.order[gone:]),
            youngest=self.youngest,
        )

    def forget(self, settled: Settled) -> None:
        """Keep what is known of settled groups on the disk alone, which has `settled` now."""
        self.order, self.forgotten = list(settled.order), settled.forgotten
        self._closed = {n for n in self._closed if not settled.covers(n)}
        self._settled = settled  # in this order: who asks meanwhile finds a group in one place or the other
        self._index.forget(settled)
        self.rewards.forget_settled(settled)

    def remove_turns(self, through: int, unsettled: Iterable[int]) -> None:
        """Remove the turns of leases below `through` but for the `unsettled` ones."""
        self.turns.remove_settled(settle_more(self._settled, through, unsettled).covers)

    def remove_places(self) -> None:
        """Remove the places that no restart needs any more."""
        with self._database.reading() as sql:
            query = "SELECT 1 FROM places WHERE NOT closed AND place < ? LIMIT 1"
            if sql is None or sql.execute(query, (self.forgotten,)).fetchone() is None:
                return
        with self._database.transaction() as sql:
            sql.execute("DELETE FROM places WHERE NOT closed AND place < ?", (self.forgotten,))


def in_order(regular: Iterable[int], places: Mapping[int, int]) -> list[int]:
    """Put the leases of `places`, which are in the order of their places, among the `regular` ones."""
    others = iter(regular)
    ordered: list[int] = []
    for lease_id, place in places.items():
        ordered += islice(others, max(0, place - len(ordered)))
        ordered.append(lease_id)
    return [*ordered, *others]
