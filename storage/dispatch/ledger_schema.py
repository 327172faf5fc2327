"""The ledger's tables in SQLite."""

import sqlite3

from bus.errors import StorageError

SCHEMA_VERSION = 3
"""Kept as SQLite's `user_version`."""

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
