"""Measures many cells, in each of which the demo learns from data of a chosen age, and reports on them.

Each cell is a run of the real system. Its outcome is a line in the file of outcomes, so that a call goes on
where an earlier one has ended."""

import asyncio
import resource
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import structlog

from benchmarks.off_policy.cell_run import base_settings, digest, is_made, make_model, run_cell, settings_of
from benchmarks.off_policy.cells import Cell
from benchmarks.off_policy.outcome import Outcome
from benchmarks.off_policy.plot import draw_curves, draw_staleness
from benchmarks.off_policy.report import report, reuse_table, staleness_tables
from benchmarks.whole_runs.call import Call
from benchmarks.whole_runs.extent import Plan
from bus.codec import Json
from launch.settings.run_config import Layer
from storage.disk.atomic_files import make_directory, write_file

log = structlog.get_logger()
MODEL = "model"
Kind = Literal["staleness", "reuse"]
TABLES: dict[Kind, Callable[[Sequence[Outcome]], str]] = {"staleness": staleness_tables, "reuse": reuse_table}


async def measure_cells(plan: Plan[Cell], stop: asyncio.Event, *, kind: Kind, steps: int) -> dict[str, Json]:
    """Measure the cells that are missing, as far as the time reaches, and report on all that are there.

    Outcomes of other settings are left out, if the initial model is there, by which they are told. Raises
    `ConfigError` for settings that do not fit, and `SluiceError` when the common initial model cannot be
    made."""
    call, model = Call(plan, Outcome.of_json), (plan.directory / MODEL).absolute()
    base = base_settings(plan.given, model, steps=steps)
    for cell in plan.cells:
        settings_of(cell, base, plan.directory)  # refuses what does not fit before anything runs
    with tempfile.TemporaryDirectory(prefix="off-policy-", ignore_cleanup_errors=True) as scratch:
        before, left_s = _cpu_s(), call.schedule.left_s()
        if call.missing and left_s > 0:
            await make_model(model, plan.given, Path(scratch), stop, limit_s=min(plan.cell_s, left_s))
        if is_made(model):
            settings = digest(base, model)
            call.results.leave_out_others(lambda _: settings)
            await call.measure(partial(_run, base, Path(scratch), stop, settings), stop)
        elif call.found:
            log.warning(
                "outcomes_not_compared", file=str(plan.outcomes), lacks=str(model),
                remedy="they may be of other settings: bring the model that they began from, or give another "
                "--directory to measure them all",
            )  # fmt: skip
        spent = _cpu_s() - before
    if call.found:
        await asyncio.to_thread(write_report, kind, call.found, plan.directory)
    done = call.schedule.done
    return {**report(call.found), **call.said(), "cpu_s_per_cell": round(spent / done, 1) if done else None}


def write_report(kind: Kind, outcomes: Sequence[Outcome], directory: Path) -> None:
    """Write the tables and draw the pictures of these outcomes."""
    make_directory(directory)
    write_file(directory / f"{kind}.md", TABLES[kind](outcomes).encode())
    if kind == "staleness":
        draw_staleness(outcomes, directory / "staleness.png")
        draw_curves(outcomes, directory / "staleness_curves.png")


async def _run(
    base: Layer, scratch: Path, stop: asyncio.Event, settings: str, cell: Cell, limit_s: float
) -> Outcome:
    return await run_cell(cell, base, scratch, stop, settings=settings, limit_s=limit_s)


def _cpu_s() -> float:
    """Return the CPU seconds of the processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
