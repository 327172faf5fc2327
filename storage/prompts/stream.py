"""Prompts of a function of the user's own, which may have no end: read in blocks, each a data set."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeVar

import structlog

from bus.errors import BusError, ConfigError
from bus.messages import Prompt
from bus.process.daemon_call import in_daemon_thread
from bus.waiting import unless
from storage.ledger.ledger import Ledger
from storage.prompt_files.dataset import streamed_prompts
from storage.prompt_files.stored_prompts import StoredPrompts, store_prompts
from storage.prompts.data_sets import DataSets
from storage.settings.data import PromptKeys

T = TypeVar("T")
log = structlog.get_logger()
BLOCK_ROWS = 256
BLOCK_S = 2.0
"""Time after which the next row ends a block, where the source is slow."""
Check = Callable[[Sequence[Prompt], str], Awaitable[list[int]]]
"""Checks prompts of a source and returns which are to be skipped; raises `ConfigError`."""


def block_of(prompts: Iterator[T]) -> Iterator[T]:
    """Yield what makes up one block: `BLOCK_ROWS` prompts, or fewer of a slow source."""
    end_s = time.monotonic() + BLOCK_S
    for prompt in islice(prompts, BLOCK_ROWS):
        yield prompt
        if time.monotonic() > end_s:
            return


def first_block(source: Path, keys: PromptKeys) -> Iterator[Prompt]:
    """Yield the prompts that a source begins with. Raises `ConfigError` for one that has none."""
    return (prompt for _, prompt in block_of(_pass(source, keys, 0)))


def _pass(source: Path, keys: PromptKeys, position: int) -> Iterator[tuple[int, Prompt]]:
    row = -1
    for row, prompt in enumerate(streamed_prompts(source, keys, position), start=position):
        yield row, prompt
    if row < 0 and position == 0:
        raise ConfigError(
            f"data source {str(source)!r} yields no rows from position 0 on: have it yield some"
        )


def _endless(source: Path, keys: PromptKeys, position: int) -> Iterator[tuple[int, Prompt]]:
    """Yield what `_pass` does, and from the first row on again wherever the source ends."""
    while True:
        yield from _pass(source, keys, position)
        position = 0


class PromptStream:
    """Reads a source on as leases need prompts; where it ends, it begins anew. The ledger knows of each block
    which row follows it, so a restart asks the source for that one."""

    wants_rewards = False

    def __init__(
        self, ledger: Ledger, data: DataSets, check: Check, *, source: Path, keys: PromptKeys, directory: Path
    ) -> None:
        self._ledger = ledger
        self._data = data
        self._check = check
        self._source = source
        self._keys = keys
        self._directory = directory
        self._rows: Iterator[tuple[int, Prompt]] | None = None
        self._next_row = 0
        """Row that follows those that were read."""
        self._block: StoredPrompts | None = None
        """A block that is yet to be checked."""
        self.waits_for = ""

    @property
    def left(self) -> int:
        """Return how many leases may be issued whose prompts were read."""
        latest = self._data.latest
        return latest.first_lease + latest.count - self._ledger.next_id

    async def extend(self, wanted: int, stop: asyncio.Event) -> None:
        """Read a block where no prompt is left: those that are left need not wait for a slow source. Raises
        `ConfigError` for what the function does or yields."""
        if wanted > 0 and self.left <= 0:
            if self._rows is None:
                self._next_row = self._data.latest.next_row or 0
                self._rows = _endless(self._source, self._keys, self._next_row)
            row = self._next_row + 1
            if self._block is None:
                self.waits_for = f"waiting for data.prompts {str(self._source)!r} to yield row {row}"
                self._block = await unless(stop, in_daemon_thread(self._read, "data source"))
                self.waits_for = ""
            if self._block is None:  # stopped
                return
            try:
                long = await self._check(self._block, str(self._source))
            except BusError as error:  # the bus is away: the dispatcher asks again
                log.warning("prompts_not_checked", source=str(self._source), reason=str(error))
                return
            self._data.go_on(self._block, next_row=self._next_row)
            self._data.skip_long(long)
            self._block = None

    def note(self, lease_id: int, rewards: Sequence[float]) -> None:
        """Go by no rewards."""

    def _read(self) -> StoredPrompts:
        return store_prompts(self._next_block(), self._directory)

    def _next_block(self) -> Iterator[Prompt]:
        for row, prompt in block_of(self._rows or iter(())):
            self._next_row = row + 1
            yield prompt
