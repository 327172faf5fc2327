"""Where the rows of a run's metrics come from: the file that storage writes, or the bus without one."""

import os
from collections.abc import Callable
from pathlib import Path

from bus.connection import Bus
from bus.messages import PolicyManifest
from bus.streams.stream_reader import StreamPosition, StreamReader
from launch.settings.run_config import RunConfig
from storage.metrics.recorder import decoded_event
from storage.metrics.records import Record, event_record, parsed

PART_BYTES = 4 << 20
"""Bytes of the file that are read at a time."""
SAMPLED_LINES = 1500
"""Lines of a long file from which its curves are drawn until all of it is read."""
LINE_BYTES = 16 << 10
"""Longest line that is sampled; a row of a step has 2 KiB."""
CONNECT_S = 1.5
BATCH = 512


class MetricsFile:
    """Reads metrics.jsonl from its beginning on, a part at a time, while it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = 0
        self._inode = 0
        self.beginnings = 0
        """Number of times that another file took the place of the one that was read."""

    @property
    def exists(self) -> bool:
        return self._path.exists()

    @property
    def left_bytes(self) -> int:
        return self._path.stat().st_size - self._place

    @property
    def read_fraction(self) -> float:
        size = self._path.stat().st_size
        return self._place / size if size else 1.0

    def take(self) -> list[Record]:
        """Return the next complete rows, of at most `PART_BYTES`; none when all were read."""
        with self._path.open("rb") as file:
            self._begin_anew(file.fileno())
            file.seek(self._place)
            part = file.read(PART_BYTES)
        end = part.rfind(b"\n") + 1
        self._place += end
        return parsed(part[:end].splitlines())

    def _begin_anew(self, descriptor: int) -> None:
        """Begin at the first byte of another file, as of a run that was removed and started again."""
        status = os.fstat(descriptor)
        if self._inode and (status.st_ino != self._inode or status.st_size < self._place):
            self._place = 0
            self.beginnings += 1
        self._inode = status.st_ino

    def sample(self) -> list[Record]:
        """Return rows from all over the file, evenly by bytes: the first complete one after each place."""
        size = self._path.stat().st_size
        found: list[Record] = []
        with self._path.open("rb") as file:
            for place in range(0, size, max(1, size // SAMPLED_LINES)):
                file.seek(place)
                found += parsed(file.read(LINE_BYTES).split(b"\n", 2)[1:2])
        return found


Locate = Callable[[str], RunConfig]
"""Says where the bus of a run is; raises `ConfigError` when that is not known."""


class BusEvents:
    """Reads the events that a run's bus still holds, for a run whose storage is on another host."""

    def __init__(self, run: str, locate: Locate) -> None:
        self._run = run
        self._locate = locate
        self._place = StreamPosition()

    async def take(self) -> list[Record]:
        """Return the rows of all events that came since the last call. Raises `BusError` without a bus."""
        where = self._locate(self._run)
        impatient = where.bus.model_copy(update={"connect_timeout_s": CONNECT_S, "patience_s": CONNECT_S})
        found: list[Record] = []
        async with Bus.connect(impatient, where.run, name="dashboard") as bus:
            policy = await bus.get("policy", PolicyManifest)
            begins = 0 if policy is None else policy[0].trains_from
            reader = StreamReader(bus, "EVENTS", bus.subject("events", "*"), after=self._place)
            while messages := await reader.take(BATCH):
                found += [
                    event_record(event, trains_from=begins, time_s=message.time_s)
                    for message in messages
                    if (event := decoded_event(message)) is not None
                ]
            self._place = reader.place
        return found
