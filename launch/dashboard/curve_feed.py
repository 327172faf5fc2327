"""The curves of a run kept up to date, read from where its metrics are when somebody asks."""

import asyncio
import time
from math import inf

import structlog

from bus.codec import Json
from bus.errors import SluiceError
from launch.dashboard.metrics_source import PART_BYTES, BusEvents, Locate, MetricsFile
from launch.dashboard.run_curves import RunCurves
from storage.disk.run_directory import RunDirectory

log = structlog.get_logger()
BUS_PERIOD_S = 2.0
"""Time between two looks at the bus, whatever the number of pages that watch the run."""


class CurveFeed:
    """Reads a file as far as asked: each `refresh` takes the next part. A long file is sampled first,
    so that its curves show at once, and then read from its beginning."""

    def __init__(self, run: RunDirectory, locate: Locate) -> None:
        self._run = run
        self._file: MetricsFile | None = None
        self._events = BusEvents(run.name, locate)
        self._asked_s = -inf
        self._read = RunCurves()
        self._sampled: RunCurves | None = None
        self._started = False
        self._beginnings = 0
        self.lock = asyncio.Lock()
        """Held while the curves change: hold it to read them."""
        self.revision = 0
        """Number that changes with the curves alone."""
        self.read_fraction = 1.0
        """How much of the metrics was read; below 1 the curves are those of a sample."""
        self.problem = ""
        """Says why no metrics could be read; empty when they were."""

    @property
    def curves(self) -> RunCurves:
        """Return the curves: of a sample, as long as the whole is being read."""
        return self._sampled or self._read

    async def refresh(self) -> None:
        """Read the next part, or what came since the last call."""
        async with self.lock:
            try:
                file = self._file_here()
                if file is not None:
                    self.revision += await asyncio.to_thread(self._take_from, file)
                elif time.monotonic() - self._asked_s >= BUS_PERIOD_S:
                    self.revision += await self._take_events()
                else:
                    return  # what the bus answered just now still holds, also that it did not
                self.problem = ""
            except (SluiceError, OSError) as error:
                log.debug("metrics_not_read", reason=str(error))
                self.problem = str(error)

    def _file_here(self) -> MetricsFile | None:
        """Return the file of the run's metrics; it may appear only after the run was looked at."""
        if self._file is None and self._run.exists:
            self._file = MetricsFile(self._run.metrics)
        return self._file if self._file is not None and self._file.exists else None

    async def _take_events(self) -> bool:
        try:
            return self._read.add(await self._events.take())
        finally:
            self._asked_s = time.monotonic()

    def _take_from(self, file: MetricsFile) -> bool:
        if not self._started:
            self._started, self._read = True, RunCurves()  # without what the bus told before
            if file.left_bytes > 2 * PART_BYTES:
                self._sampled = RunCurves()
                self.read_fraction = 0.0
                return self._sampled.add(file.sample())
        changed = False
        while rows := file.take():
            if file.beginnings != self._beginnings:
                self._beginnings, self._read = file.beginnings, RunCurves()
            changed = self._read.add(rows) or changed
            if self._sampled is not None:
                break  # the next part follows when the page asks again
        if self._sampled is None:
            return changed
        self.read_fraction = file.read_fraction
        if rows and file.left_bytes:
            return False
        self._sampled, self.read_fraction = None, 1.0
        return True


class LiveCurves:
    """Remembers what was sent to one browser."""

    def __init__(self) -> None:
        self._seen: tuple[int, float, str] | None = None
        self._curves: RunCurves | None = None
        self._width = 0
        self._last = -1

    def news(self, feed: CurveFeed) -> dict[str, Json] | None:
        """Return what replaces the steps from its `from` on; None when nothing has changed. All of the curves
        are sent when earlier steps were undone, or when their intervals became longer."""
        seen = (feed.revision, round(feed.read_fraction, 2), feed.problem)
        if seen == self._seen:
            return None
        changed = self._seen is None or seen[0] != self._seen[0]
        self._seen = seen
        head: dict[str, Json] = {"read": seen[1], "problem": seen[2]}
        if not changed:
            return head
        steps = feed.curves.steps
        same = feed.curves is self._curves and steps.width == self._width and steps.last >= self._last
        begin = self._last // self._width * self._width if same and self._last >= 0 else 0
        self._curves, self._width, self._last = feed.curves, steps.width, steps.last
        return head | {"from": begin} | feed.curves.payload(begin=begin)
