"""The ledger's tables in SQLite, and how those of older builds become so."""

import sqlite3

from bus.errors import StorageError

SCHEMA_VERSION = 3
"""Kept as SQLite's `user_version`. The first form wrote none, and one step for each lease; the second did
not know how many tokens a group has."""

_USES = """
CREATE TABLE IF NOT EXISTS uses (
    lease_id INTEGER NOT NULL, step INTEGER NOT NULL, place INTEGER NOT NULL, weight REAL NOT NULL,
    PRIMARY KEY (lease_id, step)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS uses_by_step ON uses (step);
CREATE INDEX IF NOT EXISTS uncommitted ON leases (lease_id) WHERE state = 'leased';
"""

_SCHEMA = f"""
BEGIN;
CREATE TABLE IF NOT EXISTS leases (
    lease_id INTEGER PRIMARY KEY, policy_version INTEGER NOT NULL, state TEXT NOT NULL,
    reason TEXT, spread REAL NOT NULL DEFAULT 0, tokens INTEGER NOT NULL DEFAULT 0
) STRICT;
{_USES}
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""

_FROM_FIRST_FORM = f"""
BEGIN;
{_USES}
INSERT INTO uses
    SELECT lease_id, step, row_number() OVER (PARTITION BY step ORDER BY policy_version, lease_id), 1.0
    FROM leases WHERE step IS NOT NULL;
ALTER TABLE leases DROP COLUMN step;
ALTER TABLE leases ADD COLUMN spread REAL NOT NULL DEFAULT 0;
PRAGMA user_version = 2;
COMMIT;
"""

_FROM_SECOND_FORM = """
BEGIN;
ALTER TABLE leases ADD COLUMN tokens INTEGER NOT NULL DEFAULT 0;
PRAGMA user_version = 3;
COMMIT;
"""


def prepare(connection: sqlite3.Connection) -> None:
    """Make an empty database a ledger, or bring an older one up to date; `StorageError` for any other."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if tables and not {"leases", "facts"} <= tables:
        raise StorageError(f"it holds {', '.join(sorted(tables))}")
    [(version,)] = connection.execute("PRAGMA user_version")
    if version > SCHEMA_VERSION:
        raise StorageError(f"its schema is {version}, this build's is {SCHEMA_VERSION}: upgrade this process")
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    if tables and version < 2:
        connection.executescript(_FROM_FIRST_FORM)
    if tables and version < 3:
        connection.executescript(_FROM_SECOND_FORM)
    connection.executescript(_SCHEMA)
