"""Measures many cells, in each of which a preset learns as a whole run, and reports on them.

A cell is a line in the file of outcomes, so that a call goes on where an earlier one has ended."""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.learning.cell_run import digest, run_cell, settings_of
from benchmarks.learning.cells import STEPS, Cell
from benchmarks.learning.outcome import Outcome
from benchmarks.learning.plot import draw_curves
from benchmarks.learning.report import report, table
from benchmarks.whole_runs.call import Call
from benchmarks.whole_runs.extent import Plan
from bus.codec import Json
from storage.disk.atomic_files import make_directory, write_file

TABLE, CURVES = "learning.md", "learning.png"


async def measure_cells(
    plan: Plan[Cell], stop: asyncio.Event, *, steps: int | None = None
) -> dict[str, Json]:
    """Measure the cells that are missing, as far as the time reaches, and report on all that are there.

    Without `steps` each preset takes its own number of them. Outcomes of other settings are left out.
    Raises `ConfigError` for settings that do not fit."""
    call = Call(plan, Outcome.of_json)
    lasting = {cell.preset: steps or STEPS[cell.preset] for cell in plan.cells}
    digests = {name: digest(name, plan.given, steps=lasting[name]) for name in lasting}
    call.results.leave_out_others(lambda outcome: digests.get(outcome.preset, outcome.settings))
    with tempfile.TemporaryDirectory(prefix="learning-", ignore_cleanup_errors=True) as scratch:
        configs = {
            cell: settings_of(cell, plan.given, Path(scratch) / cell.name, steps=lasting[cell.preset])
            for cell in call.missing  # what does not fit is refused before anything runs
        }

        async def measure(cell: Cell, limit_s: float) -> Outcome:
            return await run_cell(cell, configs[cell], stop, settings=digests[cell.preset], limit_s=limit_s)

        await call.measure(measure, stop)
    if call.found:
        await asyncio.to_thread(write_report, call.found, plan.directory)
    return {**report(call.found), **call.said()}


def write_report(outcomes: Sequence[Outcome], directory: Path) -> None:
    """Write the table and draw the curves of these outcomes."""
    make_directory(directory)
    write_file(directory / TABLE, table(outcomes).encode())
    draw_curves(outcomes, directory / CURVES)
