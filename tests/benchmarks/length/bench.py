"""Measures many cells, in each of which the length of answers may run away, and reports on them.

A cell is a line in the file of outcomes, so that a call goes on where an earlier one has ended."""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.length.cell_run import base_settings, digest, run_cell, settings_of
from benchmarks.length.cells import Cell
from benchmarks.length.outcome import Outcome
from benchmarks.length.plot import draw_completed
from benchmarks.length.report import report, table
from benchmarks.whole_runs.call import Call
from benchmarks.whole_runs.extent import Plan
from bus.codec import Json
from storage.disk.atomic_files import make_directory, write_file

TABLE, CURVES = "length.md", "length.png"


async def measure_cells(plan: Plan[Cell], stop: asyncio.Event, *, steps: int) -> dict[str, Json]:
    """Measure the cells that are missing, as far as the time reaches, and report on all that are there.

    Outcomes of other settings are left out. Raises `ConfigError` for settings that do not fit."""
    call, base = Call(plan, Outcome.of_json), base_settings(plan.given, steps=steps)
    settings = digest(base)
    call.results.leave_out_others(lambda _: settings)
    with tempfile.TemporaryDirectory(prefix="length-", ignore_cleanup_errors=True) as directory:
        scratch = Path(directory)
        for cell in call.missing:
            settings_of(cell, base, scratch)  # refuses what does not fit before anything runs

        async def measure(cell: Cell, limit_s: float) -> Outcome:
            return await run_cell(cell, base, scratch, stop, settings=settings, limit_s=limit_s)

        await call.measure(measure, stop)
    if call.found:
        await asyncio.to_thread(write_report, call.found, plan.directory)
    return {**report(call.found), **call.said()}


def write_report(outcomes: Sequence[Outcome], directory: Path) -> None:
    """Write the table and draw the curves of these outcomes."""
    make_directory(directory)
    write_file(directory / TABLE, table(outcomes).encode())
    draw_completed(outcomes, directory / CURVES)
