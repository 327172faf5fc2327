"""The durable account of every lease: issued, rejected, stored, given to a step, committed.

Changes take effect in memory at once and on disk with `flush`, in one transaction. Whoever makes a change
visible to another process (a lease published, a batch handed out) flushes first.
"""

import sqlite3
import threading
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Literal, Self, get_args

from bus.errors import StorageError
from storage.sampling import Candidate

State = Literal["issued", "stored", "leased", "committed", "rejected"]
_Change = tuple[str, tuple[tuple[object, ...], ...]]
"""A statement and the rows of values to run it with."""

_SCHEMA = """
BEGIN;
CREATE TABLE IF NOT EXISTS leases (
    lease_id INTEGER PRIMARY KEY, policy_version INTEGER NOT NULL, state TEXT NOT NULL,
    step INTEGER, reason TEXT
) STRICT;
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
COMMIT;
"""


@dataclass(frozen=True)
class Account:
    """Every group of the run is in exactly one of these."""

    issued: int
    """All leases ever given out."""
    rolling_out: int
    rejected: int
    stored: int
    """Complete, waiting for a step."""
    trained: int
    """Given to a step, whether its checkpoint is durable yet or not."""

    def balanced(self) -> bool:
        """True when no group is lost or counted twice."""
        return self.issued == self.rolling_out + self.rejected + self.stored + self.trained


class Ledger:
    """Leases by state. Not shared between processes: the dispatcher owns it."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._sql = connection
        self._on_disk = threading.Lock()
        self._pending: list[_Change] = []
        self._changing = threading.Lock()  # guards `_pending`, and is never held while the disk works
        self.rolling_out: dict[int, Candidate] = {}
        self.stored: dict[int, Candidate] = {}
        self.steps: dict[int, list[Candidate]] = {}
        """Groups given to each step."""
        self.reasons: Counter[str] = Counter()
        """Why groups were rejected, and how many."""
        self.next_id: int = 0
        self._trained = 0
        self._load()

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open or create the ledger at `path`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        connection: sqlite3.Connection | None = None
        try:
            connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            _refuse_foreign(connection)
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            connection.executescript(_SCHEMA)
            return cls(connection)
        except (sqlite3.Error, StorageError) as error:
            if connection is not None:
                connection.close()
            raise StorageError(
                f"{path} is not a ledger that can be used ({error}): restore it, or move it and the replay "
                "directory away to start a new run"
            ) from error

    def close(self) -> None:
        """Flush and close."""
        with closing(self._sql):
            self.flush()

    # --- changes ---

    def issue(self, count: int, policy_version: int) -> list[int]:
        """Open `count` leases at `policy_version`; returns their ids, which continue the run's sequence."""
        leases = [Candidate(policy_version, self.next_id + n) for n in range(count)]
        self.next_id += count
        self.rolling_out.update((lease.lease_id, lease) for lease in leases)
        self._change(
            "INSERT INTO leases VALUES (?, ?, 'issued', NULL, NULL)",
            *((lease.lease_id, lease.policy_version) for lease in leases),
        )
        return [lease.lease_id for lease in leases]

    def store(self, lease_id: int) -> bool:
        """The group is complete in a shard; False when that was known or it is settled otherwise."""
        lease = self.rolling_out.pop(lease_id, None)
        if lease is None:
            return False
        self.stored[lease_id] = lease
        self._change("UPDATE leases SET state = 'stored' WHERE lease_id = ?", (lease_id,))
        return True

    def reject(self, lease_id: int, reason: str) -> bool:
        """The group will not be trained on, which refunds its lease; False when it is settled otherwise."""
        if self.rolling_out.pop(lease_id, None) is None and self.stored.pop(lease_id, None) is None:
            return False
        self.reasons[reason] += 1
        self._change(
            "UPDATE leases SET state = 'rejected', reason = ? WHERE lease_id = ?", (reason, lease_id)
        )
        return True

    def lease(self, step: int, lease_ids: tuple[int, ...]) -> None:
        """Give stored groups to a step."""
        self.steps[step] = [self.stored.pop(lease_id) for lease_id in lease_ids]
        self._trained += len(lease_ids)
        self._change(
            "UPDATE leases SET state = 'leased', step = ? WHERE lease_id = ?",
            *((step, lease_id) for lease_id in lease_ids),
        )

    def commit(self, step: int) -> None:
        """A durable checkpoint holds every step up to `step`."""
        self._change("UPDATE leases SET state = 'committed' WHERE state = 'leased' AND step <= ?", (step,))

    def roll_back(self, step: int) -> int:
        """Take back the groups of every step after `step`, committed or not; returns how many groups."""
        undone = [s for s in self.steps if s > step]
        taken = [lease for s in undone for lease in self.steps.pop(s)]
        self.stored.update((lease.lease_id, lease) for lease in taken)
        self._trained -= len(taken)
        self._change("UPDATE leases SET state = 'stored', step = NULL WHERE step > ?", (step,))
        return len(taken)

    def set_fact(self, name: str, value: str) -> None:
        """Remember a named value."""
        self.facts[name] = value
        self._change(
            "INSERT INTO facts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
            (name, value),
        )

    def flush(self) -> None:
        """Make every change so far durable. Called in a worker thread.

        Raises `StorageError` when the disk refuses; the changes are kept for the next attempt.
        """
        with self._on_disk:
            with self._changing:
                pending, self._pending = self._pending, []
            try:
                self._execute(pending)
            except sqlite3.Error as error:
                with self._changing:
                    self._pending[:0] = pending
                raise StorageError(f"the ledger cannot be written: {error}") from error

    # --- questions ---

    def account(self) -> Account:
        """Where every group is."""
        return Account(
            issued=self.next_id,
            rolling_out=len(self.rolling_out),
            rejected=sum(self.reasons.values()),
            stored=len(self.stored),
            trained=self._trained,
        )

    def ahead_of(self, step: int) -> int:
        """Groups issued that no step up to `step` trains on: what admission bounds."""
        later = takewhile(lambda s: s > step, reversed(self.steps))  # steps are leased in order
        return len(self.rolling_out) + len(self.stored) + sum(len(self.steps[s]) for s in later)

    def was_issued(self, lease_id: int) -> bool:
        """Whether this run ever gave that lease out."""
        return 0 <= lease_id < self.next_id

    def _change(self, statement: str, *rows: tuple[object, ...]) -> None:
        """One change, which reaches the disk as a whole or not at all."""
        with self._changing:
            self._pending.append((statement, rows))

    def _execute(self, changes: list[_Change]) -> None:
        if not changes:
            return
        self._sql.execute("BEGIN")
        try:
            for statement, rows in changes:
                self._sql.executemany(statement, rows)
            self._sql.execute("COMMIT")
        except sqlite3.Error:
            if self._sql.in_transaction:  # some errors, such as a full disk, have ended it already
                self._sql.execute("ROLLBACK")
            raise

    def _load(self) -> None:
        self.facts: dict[str, str] = dict(self._sql.execute("SELECT name, value FROM facts"))
        [(self.next_id,)] = self._sql.execute("SELECT COALESCE(MAX(lease_id) + 1, 0) FROM leases")
        rows = self._sql.execute(
            "SELECT lease_id, policy_version, state, step, reason FROM leases "
            "ORDER BY step, policy_version, lease_id"  # as they were chosen
        )
        for lease_id, policy_version, state, step, reason in rows:
            self._place(Candidate(policy_version, lease_id), state, step, reason)
        if not self.account().balanced():
            raise StorageError(f"it lacks some of its {self.next_id} leases")

    def _place(self, lease: Candidate, state: str, step: int | None, reason: str | None) -> None:
        if state not in get_args(State) or (step is None) != (state in ("issued", "stored", "rejected")):
            raise StorageError(f"lease {lease.lease_id} is {state!r} in step {step}")
        if state == "issued":
            self.rolling_out[lease.lease_id] = lease
        elif state == "stored":
            self.stored[lease.lease_id] = lease
        elif step is None:
            self.reasons[reason or ""] += 1
        else:
            self.steps.setdefault(step, []).append(lease)
            self._trained += 1


def _refuse_foreign(connection: sqlite3.Connection) -> None:
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    if tables and not {"leases", "facts"} <= tables:
        raise StorageError(f"it holds {', '.join(sorted(tables))}")
