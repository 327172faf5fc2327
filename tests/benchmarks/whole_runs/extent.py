"""How much of a benchmark of whole runs a call measures: its flags, and what follows from them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Generic

from pydantic import ConfigDict, Field

from benchmarks.whole_runs.cells import AnyCell
from bus.config import Config
from bus.errors import ConfigError
from launch.settings.run_config import Layer

MEASUREMENTS = Path("docs/measurements")
"""Directory of a checkout whose files of outcomes are committed."""
OWN_SETTINGS = ("run", "seed", "bus")
"""Settings that each run of a benchmark has of its own."""


class Extent(Config):
    """Flags that all benchmarks of whole runs have."""

    # Cyclopts prints these flags itself.
    model_config = ConfigDict(use_attribute_docstrings=True)

    seeds: str = "0,1,2"
    """Seeds with commas."""

    parallel: int = Field(1, ge=1)
    """Runs at once. Each uses about one core."""

    minutes: float = Field(inf, ge=0)
    """Time limit of the command. No run is started that would not end by then, and what still runs is killed.
    With 0 only tables and pictures are written."""

    cell_minutes: float = Field(10.0, gt=0)
    """Time limit of a run."""

    into: Path | None = None
    """Markdown file that gets the tables, between its lines `<!-- bench NAME -->` and `<!-- end -->`."""


@dataclass(frozen=True)
class Plan(Generic[AnyCell]):
    """Which cells are measured, and how."""

    cells: Sequence[AnyCell]
    directory: Path
    """Where tables, pictures and a common initial model lie."""
    outcomes: Path
    """File of the outcomes, a line each."""
    given: Layer
    """Settings of the user over those of the benchmark."""
    parallel: int
    """Cells at once."""
    cell_s: float
    """Time limit of a cell."""
    limit_s: float = inf
    """Time limit of the call, counted from `began`."""
    began: float = field(default_factory=time.monotonic)
    """When the call began, on the monotonic clock."""


def plan_of(name: str, cells: Sequence[AnyCell], extent: Extent, given: Layer) -> Plan[AnyCell]:
    """Return the plan of a call of the benchmark `name`."""
    directory = Path(given.get("directory", f"runs/{name}"))
    is_committed = "directory" not in given and MEASUREMENTS.is_dir()
    return Plan(
        cells=cells,
        directory=directory,
        outcomes=MEASUREMENTS / f"{name}.jsonl" if is_committed else directory / "cells.jsonl",
        given=given,
        parallel=extent.parallel,
        cell_s=60 * extent.cell_minutes,
        limit_s=60 * extent.minutes,
    )


def refuse_own(given: Layer) -> None:
    """Raise `ConfigError` for settings that each run of a benchmark has of its own."""
    if own := sorted(set(OWN_SETTINGS) & set(given)):
        raise ConfigError(f"--{own[0]}: each run of the benchmark has its own, leave this out")
