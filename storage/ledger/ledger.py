"""The durable account of every lease: issued, rejected, stored, given to steps, committed.

All of it is on the disk; in memory is what is open, and the steps that a learner may still ask about.
Changes take effect in memory at once and on disk with `flush`, in one transaction. Whoever makes a change
visible to another process (a lease published, a batch handed out) flushes first."""

import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import Literal, Self, get_args

from bus.errors import ConfigError, FencedError, LostDataError, StorageError
from bus.images import NO_IMAGES, ImageCount
from storage.disk.atomic_files import lock_file
from storage.ledger.given_groups import GROUP, GivenGroups, Use
from storage.ledger.sampling import Candidate

EPOCH = "epoch"
"""Name of the fact that counts how often the ledger was opened for writing."""
SCHEMA_VERSION = 3
"""Kept as SQLite's `user_version`."""
LATER = ("computed_tokens", "images", "image_tokens")
"""Columns of the leases that earlier ledgers of this schema lack."""
_SCHEMA = f"""
BEGIN;
CREATE TABLE IF NOT EXISTS leases (
    lease_id INTEGER PRIMARY KEY, policy_version INTEGER NOT NULL, state TEXT NOT NULL,
    reason TEXT, spread REAL NOT NULL DEFAULT 0, tokens INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE IF NOT EXISTS uses (
    lease_id INTEGER NOT NULL, step INTEGER NOT NULL, place INTEGER NOT NULL, weight REAL NOT NULL,
    PRIMARY KEY (lease_id, step)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS uses_by_step ON uses (step);
CREATE INDEX IF NOT EXISTS uncommitted ON leases (lease_id) WHERE state = 'leased';
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""


def prepare(connection: sqlite3.Connection) -> None:
    """Make an empty database a ledger. Raises `StorageError` for a database that is none of this build's."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if tables and not {"leases", "facts"} <= tables:
        raise StorageError(f"it holds {', '.join(sorted(tables))}")
    [(version,)] = connection.execute("PRAGMA user_version")
    if tables and version != SCHEMA_VERSION:
        raise StorageError(
            f"its schema is {version}, this build's is {SCHEMA_VERSION}: go on with the build that wrote it"
        )
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.executescript(_SCHEMA)
    for column in LATER:
        _add_column(connection, column)


def _add_column(connection: sqlite3.Connection, column: str) -> None:
    """Add a column of counts to the leases where it is missing; builds that lack it leave it alone."""
    connection.execute("BEGIN IMMEDIATE")  # or else another process might add it at the same time
    columns = {name for _, name, *_ in connection.execute("PRAGMA table_info(leases)")}
    if column not in columns:
        connection.execute(f"ALTER TABLE leases ADD COLUMN {column} INTEGER NOT NULL DEFAULT 0")
    connection.execute("COMMIT")


def begin_epoch(connection: sqlite3.Connection) -> int:
    """Begin the next epoch, durably, and return its number: changes of earlier ones are refused then."""
    connection.execute("BEGIN IMMEDIATE")
    epoch = current_epoch(connection) + 1
    connection.execute("INSERT OR REPLACE INTO facts (name, value) VALUES (?, ?)", (EPOCH, str(epoch)))
    connection.execute("COMMIT")
    return epoch


def refuse_other_epoch(connection: sqlite3.Connection, epoch: int) -> None:
    """Raise `FencedError`, inside a transaction, when another epoch than `epoch` has begun."""
    if (found := current_epoch(connection)) != epoch:
        raise FencedError(
            f"the ledger was opened by another process: epoch {found} has followed {epoch}, whose dispatcher "
            "stops and writes nothing more"
        )


def current_epoch(connection: sqlite3.Connection) -> int:
    """Return the number of the latest epoch, 0 before the first."""
    found = connection.execute("SELECT value FROM facts WHERE name = ?", (EPOCH,)).fetchone()
    return int(found[0]) if found else 0


State = Literal["issued", "stored", "leased", "committed", "rejected"]
DAMAGED = "damaged"
"""Reason why a group that cannot be read any more is given up."""
COMMITTED = "committed"
"""Name of the fact that says up to which step a durable checkpoint holds them all."""
ATTEMPTS = "attempts."
"""Prefix of the facts that count the attempts of leases; they go when the lease rolls out no more."""
_Change = tuple[str, tuple[tuple[object, ...], ...]]
"""A statement and the rows of values to run it with."""
_NOT_OPEN = (
    "SELECT uses.lease_id, step FROM uses LEFT JOIN leases USING (lease_id) WHERE state IS NULL "
    "OR state NOT IN ('leased', 'committed') ORDER BY step, place LIMIT 1"
)


@dataclass(frozen=True)
class Account:
    """Counts of the run's groups by state; every group is in exactly one of them."""

    issued: int
    """All leases ever given out."""
    rolling_out: int
    rejected: int
    stored: int
    """Complete, never given to a step yet."""
    trained: int
    """Given to at least one step, whether its checkpoint is durable yet or not."""

    def balanced(self) -> bool:
        """True when no group is lost or counted twice."""
        return self.issued == self.rolling_out + self.rejected + self.stored + self.trained


@dataclass(frozen=True)
class Totals:
    """Counts over a whole ledger, as of its opening."""

    next_id: int
    trained: int
    """Groups given to at least one step."""
    samples: int
    """Groups given to steps, each as often as it was given."""
    newest_step: int
    reasons: Counter[str]
    """Why groups were rejected, and how many."""


def totals(sql: sqlite3.Connection, states: tuple[str, ...]) -> Totals:
    """Count what is in the ledger. Raises `StorageError` when its entries do not add up."""
    marks = ", ".join("?" * len(states))
    query = f"SELECT lease_id, state FROM leases WHERE state NOT IN ({marks}) LIMIT 1"
    if (odd := sql.execute(query, states).fetchone()) is not None:
        raise StorageError(f"lease {odd[0]} is {odd[1]!r}")
    if (odd := sql.execute(_NOT_OPEN).fetchone()) is not None:
        raise StorageError(f"lease {odd[0]} is not open to step {odd[1]}, which has it")
    [(next_id, trained)] = sql.execute(
        "SELECT COALESCE(MAX(lease_id) + 1, 0), COUNT(*) FILTER (WHERE state IN ('leased', 'committed')) "
        "FROM leases"
    )
    [(named, samples, newest)] = sql.execute(
        "SELECT COUNT(DISTINCT lease_id), COUNT(*), COALESCE(MAX(step), 0) FROM uses"
    )
    if named != trained:
        raise StorageError(f"{trained} leases are in steps, which name {named}")
    rejected = sql.execute(
        "SELECT COALESCE(reason, ''), COUNT(*) FROM leases WHERE state = 'rejected' GROUP BY reason"
    )
    reasons = Counter(dict(rejected.fetchall()))
    return Totals(next_id=next_id, trained=trained, samples=samples, newest_step=newest, reasons=reasons)


class Ledger:
    """Records the state of every lease. The dispatcher owns it: a lock keeps other processes out.

    Whoever opens it begins an epoch, which every change names: a process that the lock did not keep out, as
    on a network file system, or that was suspended meanwhile, changes nothing any more."""

    def __init__(self, connection: sqlite3.Connection, lock: BufferedRandom | None = None) -> None:
        self._sql = connection
        self._lock = lock
        self.name = "the ledger"
        """Where the ledger is, for a human."""
        self._on_disk = threading.Lock()
        self._pending: list[_Change] = []
        self._changing = threading.Lock()  # guards `_pending`, and is never held while the disk works
        self.rolling_out: dict[int, Candidate] = {}
        self.stored: dict[int, Candidate] = {}
        self._damaged: set[int] = set()
        """Groups that steps trained on and no other step may have, since they cannot be read any more."""
        self._load()
        self._epoch = current_epoch(connection)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open or create the ledger at `path`.

        Raises `ConfigError` when another process has it open, `LostDataError` for a file that is no whole
        ledger of this build, and `StorageError` when the disk refuses."""
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = lock_file(path.with_name(f".{path.name}.lock"))
        if lock is None:
            raise ConfigError(f"{path} is in use by another process: stop that `launch storage` first")
        with ExitStack() as undo:
            undo.callback(lock.close)
            try:
                connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
                undo.callback(connection.close)
                prepare(connection)
                ledger = cls(connection, lock)
                ledger.name = str(path)
                ledger._epoch = begin_epoch(connection)
            except (sqlite3.Error, StorageError) as error:
                refused = isinstance(error, sqlite3.OperationalError)  # by the disk, which may be mended
                raise (StorageError if refused else LostDataError)(
                    f"{path} is not a ledger that can be used ({error}): restore it, or move it and the "
                    "replay directory away to start a new run"
                ) from error
            undo.pop_all()
        return ledger

    def close(self) -> None:
        try:
            with closing(self._sql):
                self.flush()
        finally:
            if self._lock is not None:
                self._lock.close()

    # --- changes ---

    def issue(self, count: int, policy_version: int) -> list[int]:
        """Open `count` leases at `policy_version`; returns their ids, which continue the run's sequence."""
        leases = [Candidate(policy_version, self.next_id + n) for n in range(count)]
        self.next_id += count
        self.rolling_out.update((lease.lease_id, lease) for lease in leases)
        self._change(
            "INSERT INTO leases (lease_id, policy_version, state) VALUES (?, ?, 'issued')",
            *((lease.lease_id, lease.policy_version) for lease in leases),
        )
        return [lease.lease_id for lease in leases]

    def lower(self, lease_ids: Sequence[int], policy_version: int) -> None:
        """Let weights as old as `policy_version` sample these leases, which are rolling out. From then on
        their staleness counts from there. `flush` comes before any actor hears of it."""
        for lease_id in lease_ids:
            self.rolling_out[lease_id] = Candidate(policy_version, lease_id)
        rows = ((policy_version, lease_id) for lease_id in lease_ids)
        self._change("UPDATE leases SET policy_version = ? WHERE lease_id = ?", *rows)

    def store(
        self, lease_id: int, spread: float = 0.0, tokens: int = 0, computed_tokens: int = 0,
        images: ImageCount = NO_IMAGES,
    ) -> bool:  # fmt: skip
        """Note that the group is complete in a shard; return False when it was, or is settled otherwise.

        `spread` is the mean |reward - mean reward| of its siblings, where a strategy asks for it;
        `tokens` are theirs together, `computed_tokens` those that go through a model that shares common
        beginnings, where the learner does, and `images` what they show, where its balance is by work."""
        lease = self.rolling_out.pop(lease_id, None)
        if lease is None:
            return False
        self.drop_fact(f"{ATTEMPTS}{lease_id}")
        counts = tokens, computed_tokens, *images
        self.stored[lease_id] = Candidate(lease.policy_version, lease_id, spread, *counts)
        self._change(
            "UPDATE leases SET state = 'stored', spread = ?, tokens = ?, computed_tokens = ?, images = ?, "
            "image_tokens = ? WHERE lease_id = ?",
            (spread, *counts, lease_id),
        )
        return True

    def reject(self, lease_id: int, reason: str) -> bool:
        """Refund the lease of a group that nobody trains on; return False when it is settled otherwise."""
        if self.rolling_out.pop(lease_id, None) is None and self.stored.pop(lease_id, None) is None:
            return False
        self.drop_fact(f"{ATTEMPTS}{lease_id}")
        self.reasons[reason] += 1
        self._change(
            "UPDATE leases SET state = 'rejected', reason = ? WHERE lease_id = ?", (reason, lease_id)
        )
        return True

    def give_up(self, lease_id: int) -> None:
        """The group cannot be read any more: no step is given it from now on. One that a step trained on
        stays trained, so only one that was not is rejected."""
        if self.reject(lease_id, DAMAGED):
            return
        self._damaged.add(lease_id)
        self._change("UPDATE leases SET reason = ? WHERE lease_id = ?", (DAMAGED, lease_id))

    def lease(self, step: int, lease_ids: Sequence[int], weights: Sequence[float] = ()) -> None:
        """Give complete groups to a step: stored ones, or some that other steps trained on already."""
        weights = weights or [1.0] * len(lease_ids)
        uses = [Use(self._complete(lease_id), w) for lease_id, w in zip(lease_ids, weights, strict=True)]
        self._changes(
            (
                "INSERT INTO uses (lease_id, step, place, weight) VALUES (?, ?, ?, ?)",
                tuple((use.lease_id, step, place, use.weight) for place, use in enumerate(uses)),
            ),
            ("UPDATE leases SET state = 'leased' WHERE lease_id = ?", tuple((use.lease_id,) for use in uses)),
        )
        with self._changing:  # after the change: what no flush has seen yet counts as not on the disk
            for use in uses:
                self.stored.pop(use.lease_id, None)
                self._given.give(step, use)

    def commit(self, step: int) -> None:
        """A durable checkpoint holds every step up to `step`."""
        self._change(
            "UPDATE leases SET state = 'committed' WHERE state = 'leased' AND EXISTS "
            "(SELECT 1 FROM uses WHERE uses.lease_id = leases.lease_id AND step <= ?)",
            (step,),
        )

    def roll_back(self, step: int) -> int:
        """Take back the groups of every step after `step`, committed or not; returns how many uses."""
        undone, free = self._given.take_back(step)
        self.stored.update((group.lease_id, group) for group in free)
        self._changes(
            (
                "UPDATE leases SET state = 'stored' WHERE lease_id IN (SELECT lease_id FROM uses WHERE "
                "step > ?) AND NOT EXISTS (SELECT 1 FROM uses WHERE uses.lease_id = leases.lease_id "
                "AND step <= ?)",
                ((step, step),),
            ),
            ("DELETE FROM uses WHERE step > ?", ((step,),)),
        )
        for lease_id in self._damaged.intersection(self.stored):
            self._damaged.discard(lease_id)
            self.reject(lease_id, DAMAGED)
        return undone

    def set_fact(self, name: str, value: str) -> None:
        self.facts[name] = value
        self._change(
            "INSERT INTO facts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
            (name, value),
        )

    def drop_fact(self, name: str) -> None:
        if self.facts.pop(name, None) is not None:
            self._change("DELETE FROM facts WHERE name = ?", (name,))

    def forget(self, step: int, *, oldest_version: int) -> None:
        """Keep what is known of the steps up to `step` on the disk alone.

        Groups that were issued at `oldest_version` or later stay known, for samplers that use them again.
        Whatever is asked about is read from the disk, so this changes no answer."""
        self._given.forget(step, oldest_version=oldest_version)

    def flush(self) -> None:
        """Make every change so far durable. Called in a worker thread.

        Raises `StorageError` when the disk refuses; the changes are kept for the next attempt. Raises
        `FencedError` when another process has opened the ledger since."""
        with self._on_disk:
            with self._changing:
                pending, self._pending = self._pending, []
                steps = self._given.unflushed()
            try:
                self._execute(pending)
            except sqlite3.Error as error:
                with self._changing:
                    self._pending[:0] = pending
                raise StorageError(f"the ledger cannot be written: {error}") from error
            with self._changing:
                self._given.flushed(steps)

    # --- questions ---

    @property
    def steps(self) -> dict[int, list[Use]]:
        """Groups given to each step that is not forgotten, ascending; `uses` knows the others too."""
        return self._given.steps

    @property
    def newest_step(self) -> int:
        """Return the latest step that was given groups, 0 before the first."""
        return self._given.newest_step

    @property
    def samples(self) -> int:
        """Return the number of groups given to steps, each counted as often as it was given."""
        return self._given.samples

    def account(self) -> Account:
        return Account(
            issued=self.next_id,
            rolling_out=len(self.rolling_out),
            rejected=sum(self.reasons.values()),
            stored=len(self.stored),
            trained=self._given.trained,
        )

    def inserted(self) -> int:
        """Return the number of groups that ever became complete while somebody wanted them."""
        return len(self.stored) + self._given.trained + self.reasons["stale"]

    def owed(self, step: int, samples_each: float, *, oldest_version: int) -> float:
        """Samples that the steps after `step` still owe to the groups issued: what admission bounds.

        A group is owed `samples_each`, and nothing any more once it is older than `oldest_version`; but one
        that a later step has is counted whatever its age. With 1 this is how many groups are issued that no
        step up to `step` trains on."""
        untouched = len(self.rolling_out) + len(self.stored)
        groups = self._given.used_after(step)
        if samples_each > 1:  # else one step is enough
            groups.update(group for group, _ in self.used(oldest_version))
        paid = (self._given.times(group, step) for group in groups)
        return samples_each * untouched + sum(max(0.0, samples_each - n) for n in paid)

    def used(self, oldest_version: int) -> Iterator[tuple[Candidate, int]]:
        """Readable groups issued at `oldest_version` or later that steps were given, and how often."""
        return ((g, n) for g, n in self._given.used(oldest_version) if g.lease_id not in self._damaged)

    def uses(self, step: int) -> list[Use]:
        return self._given.uses(step)

    def was_issued(self, lease_id: int) -> bool:
        """Return whether this run ever gave that lease out."""
        return 0 <= lease_id < self.next_id

    def _complete(self, lease_id: int) -> Candidate:
        if lease_id in self.stored:
            return self.stored[lease_id]
        return self._given.group(lease_id)

    def _change(self, statement: str, *rows: tuple[object, ...]) -> None:
        self._changes((statement, rows))

    def _changes(self, *changes: _Change) -> None:
        """Note changes that reach the disk together or not at all."""
        with self._changing:
            self._pending += changes

    def _execute(self, changes: list[_Change]) -> None:
        if not changes:
            return
        self._sql.execute("BEGIN IMMEDIATE")
        try:
            refuse_other_epoch(self._sql, self._epoch)
            for statement, rows in changes:
                self._sql.executemany(statement, rows)
            self._sql.execute("COMMIT")
        except (sqlite3.Error, FencedError):
            if self._sql.in_transaction:  # some errors, such as a full disk, have ended it already
                self._sql.execute("ROLLBACK")
            raise

    def _load(self) -> None:
        self.facts: dict[str, str] = dict(
            self._sql.execute("SELECT name, value FROM facts WHERE name != ?", (EPOCH,))
        )
        counted = totals(self._sql, get_args(State))
        self.reasons: Counter[str] = counted.reasons
        """Why groups were rejected, and how many."""
        self.next_id: int = counted.next_id
        self._given = GivenGroups(
            self._sql,
            self._on_disk,
            newest_step=counted.newest_step,
            samples=counted.samples,
            trained=counted.trained,
        )
        rows = self._sql.execute(
            f"SELECT {GROUP}, leases.state FROM leases WHERE state IN ('issued', 'stored')"
        )
        for *group, state in rows:
            lease = Candidate(*group)
            (self.rolling_out if state == "issued" else self.stored)[lease.lease_id] = lease
        damaged = "SELECT lease_id FROM leases WHERE reason = ? AND state IN ('leased', 'committed')"
        self._damaged.update(lease_id for (lease_id,) in self._sql.execute(damaged, (DAMAGED,)))
        self._given.recall(int(self.facts.get(COMMITTED, "0")))
        if not self.account().balanced():
            raise StorageError(f"it lacks some of its {self.next_id} leases")
