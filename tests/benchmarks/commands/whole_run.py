"""What the commands of the benchmarks of whole runs do alike."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.commands.parts import show
from benchmarks.whole_runs.page import refuse_without_place, write_between
from bus.errors import SluiceError
from launch.process.runtime import fail, run

if TYPE_CHECKING:
    from bus.codec import Json


def run_bench(
    name: str, measure: "Callable[[asyncio.Event], Awaitable[dict[str, Json]]]", *,
    tables: Path, into: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure, put the tables that this writes into a page of the documentation, and show the report.

    Raises `ConfigError` for a page without a place for them, before anything runs."""
    if into is not None:
        refuse_without_place(into, name)
    report = run(measure)
    if into is not None and tables.exists():
        write_between(into, name, tables.read_text())
    show(report, as_json=as_json)
    if failed := report["failed"]:
        fail(SluiceError(f"runs have failed: {failed}"))
