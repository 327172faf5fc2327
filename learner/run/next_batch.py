"""The groups of the next step, which are asked for while the step before is trained."""

import asyncio
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog

from bus.codec import Json
from bus.connection.status import Activity
from bus.errors import NoActorsError, UnreadableGroupsError
from bus.requests import BatchLease
from bus.waiting import cancelled, ended_before, set_within
from learner.progress.progress import Progress
from learner.world.rank import Rank
from learner.world.world import World
from storage.client.reader import ReplayReader
from storage.disk.atomic_files import write_json

log = structlog.get_logger()
WAITS_AFTER_S = 60.0
"""Time after which a wait is a long one, and the run is `waiting`."""
PERIOD_S = 1.0
"""Time between two looks whether there is something else to note."""


class LongWait:
    """Knows since when the learner waits for what it waits for."""

    def __init__(self, file: Path, *, clock: Callable[[], float] = time.time) -> None:
        """`file` is there as long as the learner waits for long."""
        self._file = file
        self._clock = clock
        self._waits: tuple[object, ...] = ()
        self._since_s = 0.0

    def look(self, now: Activity, *place: int) -> dict[str, Json] | None:
        """Return for what the learner waits, and since when, if that is long; `place` is how far it is."""
        waits = (now.wait, *place) if now.wait else ()
        if waits != self._waits:
            self._waits, self._since_s = waits, self._clock()
        if not waits or self._clock() - self._since_s < WAITS_AFTER_S:
            return None
        text = f"{now.doing}: {now.reason}" if now.reason else now.doing
        return {"waits_for": text, "since_s": self._since_s}

    async def keep_noted(self, look: Callable[[], dict[str, Json] | None], stop: asyncio.Event) -> None:
        """Have the file say what `look` returns, and be gone where that is nothing, until `stop`."""
        noted: dict[str, Json] | None = {}  # a learner that was killed may have left one
        while True:
            found = None if stop.is_set() else look()
            if found != noted:
                noted = found
                await asyncio.to_thread(self._note, found)
            if stop.is_set():
                return
            await set_within(stop, PERIOD_S)

    def _note(self, found: dict[str, Json] | None) -> None:
        try:
            if found is None:
                self._file.unlink(missing_ok=True)
            else:
                write_json(self._file, {**found, "host": platform.node(), "pid": os.getpid()})
        except OSError as error:  # a full disk may be what is waited for
            log.warning("wait_not_noted", file=str(self._file), reason=str(error))


class NextBatch:
    """Leases the groups of a step after the other, and has every rank fetch its own."""

    def __init__(
        self, reader: ReplayReader, world: World, progress: Progress, *,
        steps: int, on_wait: Callable[[str], None],
    ) -> None:  # fmt: skip
        """Lease nothing yet."""
        self._reader, self._world, self._progress = reader, world, progress
        self._steps = steps
        self._on_wait = on_wait
        self._fetching: asyncio.Task[BatchLease] | None = None

    async def take(self, step: int, stop: asyncio.Event) -> BatchLease | None:
        """Return the groups of a step, and ask for those of the step after; None if `stop` came first. That
        no actors were there while the step before was trained is asked for again: some may have come."""
        if self._fetching is not None and _found_no_actors(self._fetching):
            self._fetching = None
        while True:
            fetching = self._fetching = self._fetching or self._begin(step)
            if not await ended_before(stop, fetching):
                return None
            while (readable := await self._world.call(Rank.fetched_by_all, step)) is None:
                if stop.is_set():
                    return None
            self._fetching = None
            if readable:  # else there are others by now
                break
        if step < self._steps:
            self._fetching = self._begin(step + 1)
        return fetching.result()

    async def drop(self) -> None:
        """Stop asking; what was leased is not taken any more."""
        if self._fetching is not None:
            await cancelled(self._fetching)
            self._fetching = None

    def _begin(self, step: int) -> asyncio.Task[BatchLease]:
        return asyncio.create_task(self._fetch(step), name=f"fetch batch {step}")

    async def _fetch(self, step: int) -> BatchLease:
        version = self._progress.trains_from + step - 1
        while True:
            lease = await self._reader.lease(step, version, on_wait=self._on_wait)
            self._on_wait("")
            with suppress(UnreadableGroupsError):  # which was reported: the next lease has other groups
                await self._world.fetch(lease)
                return lease


def _found_no_actors(fetching: asyncio.Task[BatchLease]) -> bool:
    return fetching.done() and not fetching.cancelled() and isinstance(fetching.exception(), NoActorsError)
