"""Rewards that come apart from their trajectories: which are due, which were given, which group came when.

One SQLite database a shard, beside its segments, made with the first late reward. Segments stay as written: a
reward is joined to its trajectory when that is read. A group that had a reward due becomes complete with its
last one, anywhere among the others, so its place in the shard's list of complete groups is kept here as well.
"""

import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import structlog

from bus.errors import StorageError
from bus.messages import RewardGiven
from bus.trajectory import Trajectory
from storage.disk.atomic_files import fsync_path

log = structlog.get_logger()
FILE = ".rewards.sqlite"
SCHEMA_VERSION = 1
"""Kept as SQLite's `user_version`."""

_SCHEMA = f"""
BEGIN;
CREATE TABLE IF NOT EXISTS due (
    lease_id INTEGER NOT NULL, sample INTEGER NOT NULL, PRIMARY KEY (lease_id, sample)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rewards (
    lease_id INTEGER NOT NULL, sample INTEGER NOT NULL, reward REAL NOT NULL, source TEXT NOT NULL,
    given_s REAL NOT NULL, PRIMARY KEY (lease_id, sample)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS places (lease_id INTEGER PRIMARY KEY, place INTEGER NOT NULL UNIQUE) STRICT;
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""
_FIND = "SELECT reward FROM rewards WHERE lease_id = ? AND sample = ?"

Key = tuple[int, int]
"""Lease and sample."""


class LateRewards:
    """The late rewards of one store. Changes come one at a time, questions from any thread."""

    def __init__(self, directory: Path, *, writable: bool = True) -> None:
        self._path = directory / FILE
        self._writable = writable
        self._sql: sqlite3.Connection | None = None
        self._mutex = threading.Lock()  # guards the connection
        self._missing: dict[int, set[int]] = {}
        """By lease, the samples whose reward is due and not here."""
        self._late: set[int] = set()
        """Leases that had a reward due."""
        self._places: dict[int, int] = {}
        """Place of each that is complete in the list of all complete groups, in that order."""

    def open(self) -> None:
        """Read what is there; nothing is made. Raises `StorageError` for a file that is no such database."""
        with self._connection(create=False) as sql:
            if sql is None:
                return
            rows = sql.execute("SELECT lease_id, sample FROM due").fetchall()
            given = set(sql.execute("SELECT lease_id, sample FROM rewards JOIN due USING (lease_id, sample)"))
            self._places = dict(sql.execute("SELECT lease_id, place FROM places ORDER BY place"))
        self._late, self._missing = {lease_id for lease_id, _ in rows}, {}
        for lease_id, sample in rows:
            if (lease_id, sample) not in given:
                self._missing.setdefault(lease_id, set()).add(sample)

    def close(self) -> None:
        """Let the file go."""
        with self._mutex:
            if self._sql is not None:
                self._sql.close()
                self._sql = None

    # --- questions ---

    def is_late(self, lease_id: int) -> bool:
        """Whether a reward of this group was due when it was stored."""
        return lease_id in self._late

    def is_missing(self, lease_id: int) -> bool:
        """Whether a reward of this group is due and not here."""
        return lease_id in self._missing

    def settled_by(self, fresh: Iterable[Key]) -> list[int]:
        """Groups that lack these rewards and no others."""
        given: dict[int, set[int]] = {}
        for lease_id, sample in fresh:
            given.setdefault(lease_id, set()).add(sample)
        return [n for n, samples in given.items() if n in self._missing and self._missing[n] <= samples]

    def is_due(self, lease_id: int, sample: int) -> bool:
        """Whether this trajectory was stored without its reward, given since or not."""
        if lease_id not in self._late:
            return False
        if sample in self._missing.get(lease_id, ()):
            return True
        with self._connection(create=False) as sql:
            query = "SELECT 1 FROM due WHERE lease_id = ? AND sample = ?"
            return sql is not None and sql.execute(query, (lease_id, sample)).fetchone() is not None

    def joined(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with its reward; unchanged when that is not late, or has not come."""
        if not trajectory.reward_due:
            return trajectory
        with self._connection(create=False) as sql:
            key = trajectory.lease_id, trajectory.sample
            found = None if sql is None else sql.execute(_FIND, key).fetchone()
        return trajectory if found is None else replace(trajectory, reward=found[0], reward_due=False)

    def order(self, whole: Iterable[int]) -> list[int]:
        """The groups of `whole` that are complete, in the order in which they became so.

        A group is whole when all its trajectories are stored; `whole` is in the order of that.
        """
        if not self._late:
            return list(whole)
        leases = list(whole)
        others = iter([lease_id for lease_id in leases if lease_id not in self._late])
        ordered: list[int] = []
        for lease_id, place in self._places.items():
            while len(ordered) < place and (other := next(others, None)) is not None:
                ordered.append(other)
            ordered.append(lease_id)
        ordered += others
        return ordered

    def unplaced(self, whole: Iterable[int]) -> list[int]:
        """Groups of `whole` that lack no reward and have no place: a crash came before they got it."""
        return [n for n in whole if n in self._late and n not in self._places and n not in self._missing]

    # --- changes, each durable on return ---

    def expect(self, trajectories: Iterable[Trajectory]) -> None:
        """Note which of these, about to be stored, have their reward due. Raises `StorageError`."""
        due = [(t.lease_id, t.sample) for t in trajectories if t.reward_due]
        known = [(t.lease_id, t.sample) for t in trajectories if t.lease_id in self._late]
        if not due and not known:
            return
        with self._transaction() as sql:
            # one that was noted and then not stored may come again with its reward, from another actor
            sql.executemany("DELETE FROM due WHERE lease_id = ? AND sample = ?", known)
            sql.executemany("INSERT OR REPLACE INTO due VALUES (?, ?)", due)
            given = {key for key in due if sql.execute(_FIND, key).fetchone()}
            touched = {lease_id for lease_id, _ in (*due, *known)}
            late = {
                n for n in touched if sql.execute("SELECT 1 FROM due WHERE lease_id = ?", (n,)).fetchone()
            }
        for lease_id, sample in known:
            self._forget(lease_id, sample)
        for lease_id, sample in due:
            if (lease_id, sample) not in given:
                self._missing.setdefault(lease_id, set()).add(sample)
        self._late -= touched - late
        self._late |= late

    def first_of(self, rewards: Iterable[RewardGiven]) -> tuple[dict[Key, RewardGiven], Counter[str]]:
        """Those that are the first of their trajectories, and how many are `taken`, there `again` as they
        were, or `differing` from the first, which is kept."""
        fresh: dict[Key, RewardGiven] = {}
        counts = Counter[str]()
        with self._connection(create=False) as sql:
            for given in rewards:
                key = given.lease_id, given.sample
                found = None if sql is None else sql.execute(_FIND, key).fetchone()
                if key not in fresh and found is None:
                    fresh[key] = given
                    counts["taken"] += 1
                    continue
                [first] = found or [fresh[key].reward]
                counts["again" if given.reward == first else "differing"] += 1
                if given.reward != first:
                    log.warning("reward_differs", kept=first, **asdict(given))
        return fresh, counts

    def keep(self, fresh: Mapping[Key, RewardGiven], places: Mapping[int, int]) -> None:
        """Keep these rewards, and the places of the groups that become complete now.

        Raises `StorageError` when the disk refuses; then nothing has changed."""
        if not fresh and not places:
            return
        now = time.time()
        with self._transaction() as sql:
            sql.executemany(
                "INSERT INTO rewards VALUES (?, ?, ?, ?, ?)",
                [(*key, given.reward, given.source, now) for key, given in fresh.items()],
            )
            sql.executemany("INSERT INTO places VALUES (?, ?)", places.items())
        for lease_id, sample in fresh:
            self._forget(lease_id, sample)
        self._places |= places

    # --- inside ---

    def _forget(self, lease_id: int, sample: int) -> None:
        missing = self._missing.get(lease_id, set())
        missing.discard(sample)
        if not missing:
            self._missing.pop(lease_id, None)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._connection(create=True) as sql:
            assert sql is not None
            sql.execute("BEGIN")
            try:
                yield sql
                sql.execute("COMMIT")
            except BaseException:
                if sql.in_transaction:  # some errors, such as a full disk, have ended it already
                    sql.execute("ROLLBACK")
                raise

    @contextmanager
    def _connection(self, *, create: bool) -> Iterator[sqlite3.Connection | None]:
        """The open database, or None while there is no file and none is to be made."""
        with self._mutex:
            try:
                if self._sql is None and (create or self._path.exists()):
                    self._sql = _connect(self._path, writable=self._writable)
                yield self._sql
            except sqlite3.Error as error:
                raise StorageError(f"{self._path} cannot be used ({error}): restore it") from error


def _connect(path: Path, *, writable: bool) -> sqlite3.Connection | None:
    """None for a reader while the writer is about to make it."""
    uri = f"{path.absolute().as_uri()}?mode={'rwc' if writable else 'ro'}"
    with ExitStack() as undo:
        sql = sqlite3.connect(uri, uri=True, check_same_thread=False, isolation_level=None)
        undo.callback(sql.close)
        [(version,)] = sql.execute("PRAGMA user_version")
        if version > SCHEMA_VERSION:
            raise StorageError(f"{path} has schema {version}, this build's is {SCHEMA_VERSION}: upgrade it")
        if version == 0 and not writable:
            return None
        if writable:
            sql.execute("PRAGMA journal_mode=WAL")
            sql.execute("PRAGMA synchronous=FULL")
            sql.executescript(_SCHEMA)
            fsync_path(path.parent)
        undo.pop_all()
    return sql
