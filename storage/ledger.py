"""The durable account of every lease: issued, rejected, stored, given to a step, committed.

Changes take effect in memory at once and on disk with `flush`, in one transaction. Whoever makes a change
visible to another process (a lease published, a batch handed out) flushes first.
"""

import sqlite3
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from bus.errors import StorageError
from storage.sampling import Candidate

State = Literal["issued", "stored", "leased", "committed", "rejected"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS leases (
    lease_id INTEGER PRIMARY KEY, policy_version INTEGER NOT NULL, state TEXT NOT NULL,
    step INTEGER, reason TEXT
) STRICT;
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
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
        self._pending: list[tuple[str, tuple[object, ...]]] = []
        self._lock = threading.Lock()
        self.rolling_out: dict[int, Candidate] = {}
        self.stored: dict[int, Candidate] = {}
        self.steps: dict[int, list[Candidate]] = {}
        """Groups given to each step."""
        self.reasons: Counter[str] = Counter()
        """Why groups were rejected, and how many."""
        self._load()

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open or create the ledger at `path`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            connection.executescript(_SCHEMA)
            return cls(connection)
        except sqlite3.DatabaseError as error:
            connection.close()
            raise StorageError(
                f"{path} is not a ledger ({error}): move it away to start a new run"
            ) from error

    def close(self) -> None:
        """Flush and close."""
        self.flush()
        self._sql.close()

    # --- changes ---

    def issue(self, count: int, policy_version: int) -> list[int]:
        """Open `count` leases at `policy_version`; returns their ids, which continue the run's sequence."""
        leases = [Candidate(policy_version, self.next_id + n) for n in range(count)]
        self.next_id += count
        for lease in leases:
            self.rolling_out[lease.lease_id] = lease
            self._write(
                "INSERT INTO leases VALUES (?, ?, 'issued', NULL, NULL)", lease.lease_id, lease.policy_version
            )
        return [lease.lease_id for lease in leases]

    def store(self, lease_id: int) -> bool:
        """The group is complete in a shard; False when that was known or it is settled otherwise."""
        lease = self.rolling_out.pop(lease_id, None)
        if lease is None:
            return False
        self.stored[lease_id] = lease
        self._write("UPDATE leases SET state = 'stored' WHERE lease_id = ?", lease_id)
        return True

    def reject(self, lease_id: int, reason: str) -> bool:
        """The group will not be trained on, which refunds its lease; False when it is settled otherwise."""
        if self.rolling_out.pop(lease_id, None) is None and self.stored.pop(lease_id, None) is None:
            return False
        self.reasons[reason] += 1
        self._write("UPDATE leases SET state = 'rejected', reason = ? WHERE lease_id = ?", reason, lease_id)
        return True

    def lease(self, step: int, lease_ids: tuple[int, ...]) -> None:
        """Give stored groups to a step."""
        self.steps[step] = [self.stored.pop(lease_id) for lease_id in lease_ids]
        for lease_id in lease_ids:
            self._write("UPDATE leases SET state = 'leased', step = ? WHERE lease_id = ?", step, lease_id)

    def commit(self, step: int) -> None:
        """A durable checkpoint holds every step up to `step`."""
        self._write("UPDATE leases SET state = 'committed' WHERE state = 'leased' AND step <= ?", step)

    def roll_back(self, step: int) -> int:
        """Take back the groups of every step after `step`; returns how many groups that are."""
        undone = [s for s in self.steps if s > step]
        taken = [lease for s in undone for lease in self.steps.pop(s)]
        self.stored.update({lease.lease_id: lease for lease in taken})
        self._write("UPDATE leases SET state = 'stored', step = NULL WHERE step > ?", step)
        return len(taken)

    def set_fact(self, name: str, value: str) -> None:
        """Remember a named value."""
        self.facts[name] = value
        self._write("INSERT INTO facts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                    name, value)  # fmt: skip

    def flush(self) -> None:
        """Make every change so far durable. Called in a worker thread."""
        with self._lock:
            pending, self._pending = self._pending, []
            if not pending:
                return
            self._sql.execute("BEGIN")
            for statement, values in pending:
                self._sql.execute(statement, values)
            self._sql.execute("COMMIT")

    # --- questions ---

    def account(self) -> Account:
        """Where every group is."""
        return Account(
            issued=self.next_id,
            rolling_out=len(self.rolling_out),
            rejected=sum(self.reasons.values()),
            stored=len(self.stored),
            trained=sum(map(len, self.steps.values())),
        )

    def ahead_of(self, step: int) -> int:
        """Groups issued that no step up to `step` trains on: what admission bounds."""
        last = next(reversed(self.steps), 0)
        later = sum(len(self.steps.get(s, ())) for s in range(step + 1, last + 1))
        return len(self.rolling_out) + len(self.stored) + later

    def _write(self, statement: str, *values: object) -> None:
        with self._lock:
            self._pending.append((statement, values))

    def _load(self) -> None:
        self.facts: dict[str, str] = dict(self._sql.execute("SELECT name, value FROM facts"))
        self.next_id: int = self._sql.execute("SELECT COALESCE(MAX(lease_id) + 1, 0) FROM leases").fetchone()[
            0
        ]
        rows = self._sql.execute(
            "SELECT lease_id, policy_version, state, step, reason FROM leases ORDER BY step, lease_id"
        )
        for lease_id, policy_version, state, step, reason in rows:
            lease = Candidate(policy_version, lease_id)
            if state == "issued":
                self.rolling_out[lease_id] = lease
            elif state == "stored":
                self.stored[lease_id] = lease
            elif state == "rejected":
                self.reasons[reason] += 1
            else:
                self.steps.setdefault(step, []).append(lease)
