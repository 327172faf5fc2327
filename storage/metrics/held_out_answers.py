"""Answers to held-out prompts in a run's directory, for people: those of the latest evaluations.

They lie in a SQLite database of their own, apart from everything that is trained on."""

import asyncio
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from bus.codec import decode, encode
from bus.connection import Bus
from bus.errors import StorageError
from bus.evaluation_messages import HeldOutAnswers
from bus.streams.consume import Inbox, consume_batches
from storage.disk.atomic_files import fsync_path, temporary_sibling
from storage.disk.file_errors import writing

log = structlog.get_logger()
_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    number INTEGER PRIMARY KEY AUTOINCREMENT, data_set TEXT NOT NULL, version INTEGER NOT NULL,
    prompt INTEGER NOT NULL, body BLOB NOT NULL, UNIQUE (data_set, version, prompt)
) STRICT"""
_OLDER = """
DELETE FROM answers WHERE data_set = ?1 AND version NOT IN (
    SELECT version FROM answers WHERE data_set = ?1 GROUP BY version ORDER BY max(number) DESC LIMIT ?2
)"""
BATCH = 16
"""Messages that are stored at a time."""


@dataclass(frozen=True)
class HeldOutStore:
    """The database of one run; each call opens it anew. Raises `StorageError` where it cannot be used."""

    path: Path

    def keep(self, answers: Sequence[HeldOutAnswers], *, evaluations: int) -> None:
        """Store answers durably, in place of those to the same prompt by the same version, and remove those
        of older evaluations than the latest so many of each data set."""
        if not self.path.exists():
            self._make()
        with self._opened("rw") as sql:
            sql.execute("PRAGMA synchronous=FULL")
            with sql:
                sql.executemany(
                    "INSERT OR REPLACE INTO answers (data_set, version, prompt, body) VALUES (?, ?, ?, ?)",
                    [(one.data_set, one.policy_version, one.prompt, encode(one)) for one in answers],
                )
                for data_set in {one.data_set for one in answers}:
                    sql.execute(_OLDER, (data_set, evaluations))

    def _make(self) -> None:
        unfinished = HeldOutStore(temporary_sibling(self.path))
        with unfinished._opened("rwc") as sql:
            sql.execute("PRAGMA journal_mode=WAL")
            sql.execute(_SCHEMA)
        with writing(self.path):
            unfinished.path.replace(self.path)
            fsync_path(self.path.parent)

    def numbers(self) -> list[int]:
        """Return the numbers of the prompts that have answers, ascending: prompt by prompt as they came."""
        if not self.path.exists():
            return []
        with self._opened("ro") as sql:
            return [number for (number,) in sql.execute("SELECT number FROM answers ORDER BY number")]

    def read(self, numbers: Sequence[int]) -> dict[int, HeldOutAnswers]:
        if not self.path.exists():
            return {}
        query = "SELECT body FROM answers WHERE number = ?"
        with self._opened("ro") as sql:
            found = ((number, sql.execute(query, (number,)).fetchone()) for number in numbers)
            return {number: decode(row[0], HeldOutAnswers) for number, row in found if row is not None}

    @contextmanager
    def _opened(self, mode: str) -> Iterator[sqlite3.Connection]:
        try:
            uri = f"{self.path.absolute().as_uri()}?mode={mode}"
            with closing(sqlite3.connect(uri, uri=True)) as sql:
                yield sql
        except sqlite3.Error as error:
            raise StorageError(f"{self.path} cannot be used ({error}): restore or remove it") from error


async def keep_held_out_answers(
    bus: Bus, store: HeldOutStore, stop: asyncio.Event, *, evaluations: int
) -> None:
    """Store the answers that actors send until `stop`. Where the disk refuses they are left out: nobody
    trains on them."""

    async def keep(answers: list[HeldOutAnswers]) -> None:
        try:
            await asyncio.to_thread(store.keep, answers, evaluations=evaluations)
        except StorageError as error:
            log.warning("held_out_answers_not_kept", reason=str(error))

    inbox = Inbox(bus, "OUTCOMES", "answers")
    await consume_batches(inbox, bus, HeldOutAnswers, keep, stop=stop, limit=BATCH)
