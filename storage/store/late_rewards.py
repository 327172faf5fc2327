"""Rewards that come apart from their trajectories: which are due, and which were given.

Segments stay as written: a reward is joined to its trajectory when that is read."""

import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import NamedTuple

import structlog

from bus.messages import RewardGiven
from storage.store.group_database import GroupDatabase
from storage.store.settled import Settled

log = structlog.get_logger()
_FIND = "SELECT reward, source FROM rewards WHERE lease_id = ? AND sample = ?"
Key = tuple[int, int]
"""Lease and sample."""


class LateReward(NamedTuple):
    """A reward that came later."""

    reward: float
    source: str


class LateRewards:
    """The late rewards of one store. Changes come one at a time, questions from any thread."""

    def __init__(self, database: GroupDatabase) -> None:
        self._database = database
        self._missing: dict[int, set[int]] = {}
        """Samples whose reward is due and not here, by lease."""
        self._late: set[int] = set()
        """Leases that had a reward due."""

    def load(self, settled: Settled) -> None:
        """Read what is there of groups that are not settled; nothing is made. Raises `StorageError` for a
        file that is no such database."""
        with self._database.reading() as sql:
            if sql is None:
                return
            rows = [
                key for key in sql.execute("SELECT lease_id, sample FROM due") if not settled.covers(key[0])
            ]
            given = {key for key in rows if sql.execute(_FIND, key).fetchone()}
        self._late, self._missing = {lease_id for lease_id, _ in rows}, {}
        for lease_id, sample in rows:
            if (lease_id, sample) not in given:
                self._missing.setdefault(lease_id, set()).add(sample)

    # --- questions ---

    def is_late(self, lease_id: int) -> bool:
        """Tell whether a reward of this group, which is not settled, was due when it was stored."""
        return lease_id in self._late

    def was_late(self, lease_id: int) -> bool:
        """Tell the same of any group, by asking the disk."""
        with self._database.reading() as sql:
            query = "SELECT 1 FROM due WHERE lease_id = ? LIMIT 1"
            return sql is not None and sql.execute(query, (lease_id,)).fetchone() is not None

    def is_missing(self, lease_id: int) -> bool:
        """Tell whether a reward of this group is due and not here."""
        return lease_id in self._missing

    def settled_by(self, fresh: Iterable[Key]) -> list[int]:
        """Return the groups that lack these rewards and no others."""
        given: dict[int, set[int]] = {}
        for lease_id, sample in fresh:
            given.setdefault(lease_id, set()).add(sample)
        return [n for n, samples in given.items() if n in self._missing and self._missing[n] <= samples]

    def is_due(self, lease_id: int, sample: int) -> bool:
        """Tell whether this trajectory was stored without its reward, given since or not."""
        if lease_id not in self._late:
            return False
        with self._database.reading() as sql:
            query = "SELECT 1 FROM due WHERE lease_id = ? AND sample = ?"
            return sql is not None and sql.execute(query, (lease_id, sample)).fetchone() is not None

    def reward_of(self, lease_id: int, sample: int) -> LateReward | None:
        """Return the reward that this trajectory was given, or None."""
        with self._database.reading() as sql:
            found = None if sql is None else sql.execute(_FIND, (lease_id, sample)).fetchone()
        return None if found is None else LateReward(*found)

    def first_of(self, rewards: Iterable[RewardGiven]) -> tuple[dict[Key, RewardGiven], Counter[str]]:
        """Return the rewards that are the first of their trajectories, and counts of all.

        They are counted as `taken`, there `again` as they were, or `differing` from the first, which is kept.
        """
        fresh: dict[Key, RewardGiven] = {}
        counts = Counter[str]()
        with self._database.reading() as sql:
            for given in rewards:
                key = given.lease_id, given.sample
                found = None if sql is None else sql.execute(_FIND, key).fetchone()
                if key not in fresh and found is None:
                    fresh[key] = given
                    counts["taken"] += 1
                    continue
                first = fresh[key].reward if found is None else found[0]
                counts["again" if given.reward == first else "differing"] += 1
                if given.reward != first:
                    log.warning("reward_differs", kept=first, **asdict(given))
        return fresh, counts

    # --- changes ---

    def expect(self, due: Iterable[Key], stored: Iterable[Key]) -> None:
        """Note, durably, which of the trajectories about to be stored have their reward due. Raises
        `StorageError` when the disk refuses."""
        due = list(due)
        known = [key for key in stored if key[0] in self._late]
        if not due and not known:
            return
        with self._database.transaction() as sql:
            # A trajectory that was noted and not stored may come again with its reward, from another actor.
            sql.executemany("DELETE FROM due WHERE lease_id = ? AND sample = ?", known)
            sql.executemany("INSERT OR REPLACE INTO due VALUES (?, ?)", due)
            given = {key for key in due if sql.execute(_FIND, key).fetchone()}
            touched = {lease_id for lease_id, _ in (*due, *known)}
            late = {
                n for n in touched if sql.execute("SELECT 1 FROM due WHERE lease_id = ?", (n,)).fetchone()
            }
        self.forget(known)
        for lease_id, sample in due:
            if (lease_id, sample) not in given:
                self._missing.setdefault(lease_id, set()).add(sample)
        self._late -= touched - late
        self._late |= late

    @staticmethod
    def insert(sql: sqlite3.Connection, fresh: Mapping[Key, RewardGiven]) -> None:
        """Write rewards in a transaction; `forget` them as missing once it is durable."""
        now = time.time()
        sql.executemany(
            "INSERT INTO rewards VALUES (?, ?, ?, ?, ?)",
            [(*key, given.reward, given.source, now) for key, given in fresh.items()],
        )

    def forget_settled(self, settled: Settled) -> None:
        """Keep what is known of settled groups on the disk alone."""
        self._late = {n for n in self._late if not settled.covers(n)}
        self._missing = {n: samples for n, samples in self._missing.items() if not settled.covers(n)}

    def remove(self, lease_ids: Iterable[int]) -> None:
        """Remove what the disk has of these groups, whose trajectories are gone for good."""
        with self._database.reading() as sql:
            if sql is None:
                return
        keys = [(lease_id,) for lease_id in lease_ids]
        with self._database.transaction() as sql:
            sql.executemany("DELETE FROM rewards WHERE lease_id = ?", keys)
            sql.executemany("DELETE FROM due WHERE lease_id = ?", keys)

    def forget(self, keys: Iterable[Key]) -> None:
        for lease_id, sample in keys:
            missing = self._missing.get(lease_id, set())
            missing.discard(sample)
            if not missing:
                self._missing.pop(lease_id, None)
