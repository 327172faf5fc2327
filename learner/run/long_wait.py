"""Notes that the learner waits for long: in its status, and in the run's directory for who lists runs."""

import asyncio
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from bus.codec import Json
from bus.connection.status import Activity
from bus.waiting import set_within
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
