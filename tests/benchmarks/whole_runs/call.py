"""One call of a benchmark of whole runs: measures the cells that are missing, and tells of all."""

import asyncio
from collections.abc import Callable
from typing import Generic

from benchmarks.whole_runs.cells import AnyCell
from benchmarks.whole_runs.extent import Plan
from benchmarks.whole_runs.results import AnyOutcome, Results
from benchmarks.whole_runs.schedule import Measure, Schedule
from bus.codec import Json
from storage.metrics.records import Record


class Call(Generic[AnyCell, AnyOutcome]):
    """The outcomes that are there, the cells that are missing, and what has become of these."""

    def __init__(self, plan: Plan[AnyCell], read: Callable[[Record], AnyOutcome]) -> None:
        """Read the outcomes, each line by `read`."""
        self.results = Results(plan.outcomes, read)
        self.schedule = Schedule[AnyCell, AnyOutcome](self.results.add, plan.cell_s, plan.limit_s, plan.began)
        self._plan = plan

    @property
    def missing(self) -> list[AnyCell]:
        """Return the cells of the plan that have no outcome."""
        return [cell for cell in self._plan.cells if cell not in self.results.outcomes]

    @property
    def found(self) -> list[AnyOutcome]:
        """Return the outcomes of the cells of the plan."""
        return [self.results.outcomes[cell] for cell in self._plan.cells if cell in self.results.outcomes]

    async def measure(self, run: Measure[AnyCell, AnyOutcome], stop: asyncio.Event) -> None:
        """Run the cells that are missing, as far as the time reaches."""
        await self.schedule.run(self.missing, run, parallel=self._plan.parallel, stop=stop)

    def said(self) -> dict[str, Json]:
        """Return what became of the cells, for the report of a call."""
        return {
            "measured_now": self.schedule.done,
            "left": [cell.name for cell in self.missing],
            "of_other_settings": list(self.results.left_out),
            "failed": dict(self.schedule.failed),
            "longest_cell_s": round(self.schedule.longest_s, 1),
            "directory": str(self._plan.directory),
            "outcomes": str(self._plan.outcomes),
        }
