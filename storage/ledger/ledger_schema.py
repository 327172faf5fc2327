"""The ledger's tables in SQLite."""

import sqlite3

from bus.errors import FencedError, StorageError

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
