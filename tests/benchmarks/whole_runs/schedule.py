"""Runs cells side by side within a time limit, and keeps what each has found."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Generic

import structlog

from benchmarks.whole_runs.cells import AnyCell
from benchmarks.whole_runs.results import AnyOutcome
from bus.errors import SluiceError

log = structlog.get_logger()
SPARE_S = 10.0
"""Time at the end of the limit for tables and pictures."""
Measure = Callable[[AnyCell, float], Awaitable[AnyOutcome]]
"""Runs a cell within so many seconds. Raises `SluiceError` when it fails."""


@dataclass
class Schedule(Generic[AnyCell, AnyOutcome]):
    """What has become of the cells of one call."""

    keep: Callable[[AnyOutcome], None]
    """Is called with each outcome as soon as it is there."""
    cell_s: float
    """Time limit of a cell."""
    limit_s: float = inf
    """Time limit of the call, counted from `began`."""
    began: float = field(default_factory=time.monotonic)
    done: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    """Why cells failed, by name."""
    longest_s: float = 0.0
    """The longest time that a cell took."""

    def left_s(self) -> float:
        """Return how long a cell that is started now may take."""
        return self.began + self.limit_s - SPARE_S - time.monotonic()

    async def run(
        self,
        cells: Sequence[AnyCell],
        measure: Measure[AnyCell, AnyOutcome],
        *,
        parallel: int,
        stop: asyncio.Event,
    ) -> None:
        """Run the cells in order, `parallel` at once, until all are done, the time is over, or `stop`.

        A cell that fails is noted, and the others go on."""
        waiting = deque(cells)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(parallel):
                tasks.create_task(self._work(waiting, measure, stop))

    async def _work(
        self, waiting: deque[AnyCell], measure: Measure[AnyCell, AnyOutcome], stop: asyncio.Event
    ) -> None:
        while waiting and not stop.is_set() and self.left_s() > self.longest_s:
            await self._run_one(waiting.popleft(), measure, stop)

    async def _run_one(
        self, cell: AnyCell, measure: Measure[AnyCell, AnyOutcome], stop: asyncio.Event
    ) -> None:
        began, left_s = time.monotonic(), self.left_s()
        try:
            outcome = await measure(cell, min(self.cell_s, left_s))
        except SluiceError as error:
            if stop.is_set() or self.left_s() <= 0:  # it was cut off, and is measured next time
                return
            self.failed[cell.name] = str(error)
            log.warning("cell_failed", cell=cell.name, reason=str(error))
            return
        took_s = time.monotonic() - began
        self.longest_s = max(self.longest_s, took_s)
        self.done += 1
        self.keep(outcome)
        figures = {name: round(value, 3) for name, value in outcome.figures().items()}
        log.info("cell_measured", cell=cell.name, seconds=round(took_s, 1), **figures)
