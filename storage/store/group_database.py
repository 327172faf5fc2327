"""What a shard must remember of its groups beside its segments, in one SQLite database.

The database is made with the first reward that comes late, the first group that is closed short or the first
turn of a rollout that was interrupted. Whatever belongs together is written in one transaction."""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bus.errors import LostDataError, StorageError
from storage.disk.atomic_files import fsync_path

FILE = ".groups.sqlite"
SCHEMA_VERSION = 1
"""Kept as SQLite's `user_version`."""
# In `places`, `closed` counts the trajectories that a group was closed short with; 0 for one that was not.

_SCHEMA = f"""
BEGIN;
CREATE TABLE IF NOT EXISTS due (
    lease_id INTEGER NOT NULL, sample INTEGER NOT NULL, PRIMARY KEY (lease_id, sample)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rewards (
    lease_id INTEGER NOT NULL, sample INTEGER NOT NULL, reward REAL NOT NULL, source TEXT NOT NULL,
    given_s REAL NOT NULL, PRIMARY KEY (lease_id, sample)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS places (
    lease_id INTEGER PRIMARY KEY, place INTEGER NOT NULL UNIQUE, closed INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS turns (
    lease_id INTEGER NOT NULL, rollout INTEGER NOT NULL, number INTEGER NOT NULL, body BLOB NOT NULL,
    PRIMARY KEY (lease_id, rollout, number)
) STRICT;
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""


class GroupDatabase:
    """The database of one store. Threads that share it take turns."""

    def __init__(self, directory: Path, *, writable: bool) -> None:
        self._path = directory / FILE
        self._writable = writable
        self._sql: sqlite3.Connection | None = None
        self._mutex = threading.Lock()  # guards the connection

    def close(self) -> None:
        with self._mutex:
            if self._sql is not None:
                self._sql.close()
                self._sql = None

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection | None]:
        """Give the connection, or None while there is no file. Raises `StorageError` for a file that is no
        such database."""
        with self._connection(create=False) as sql:
            yield sql

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Make what is written inside durable as a whole; the file is made if there is none. Raises
        `StorageError` when the disk refuses; then nothing has changed."""
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
        with self._mutex:
            try:
                if self._sql is None and (create or self._path.exists()):
                    self._sql = _connect(self._path, writable=self._writable)
                yield self._sql
            except sqlite3.Error as error:
                refused = isinstance(error, sqlite3.OperationalError)  # by the disk, which may be mended
                raise (StorageError if refused else LostDataError)(
                    f"{self._path} cannot be used ({error}): restore it"
                ) from error


def _connect(path: Path, *, writable: bool) -> sqlite3.Connection | None:
    uri = f"{path.absolute().as_uri()}?mode={'rwc' if writable else 'ro'}"
    with ExitStack() as undo:
        sql = sqlite3.connect(uri, uri=True, check_same_thread=False, isolation_level=None)
        undo.callback(sql.close)
        [(version,)] = sql.execute("PRAGMA user_version")
        if version > SCHEMA_VERSION:
            raise LostDataError(f"{path} has schema {version}, this build's is {SCHEMA_VERSION}: upgrade it")
        if version == 0 and not writable:
            return None
        if writable:
            sql.execute("PRAGMA journal_mode=WAL")
            sql.execute("PRAGMA synchronous=FULL")
            sql.executescript(_SCHEMA)
            fsync_path(path.parent)
        undo.pop_all()
    return sql
