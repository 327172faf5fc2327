"""`launch bench learning`: whether the presets of several turns or agents learn, in whole runs."""

from functools import partial
from typing import Annotated

from cyclopts import Group, Parameter
from pydantic import Field

from benchmarks.commands.parts import AsJson, bench
from benchmarks.commands.whole_run import run_bench
from benchmarks.whole_runs.extent import Extent, plan_of, refuse_own
from bus.errors import ConfigError
from launch.cli import options
from launch.process.log_settings import configure_logging
from launch.settings.run_config import Layer, RunConfig, flags

NAME = "learning"


class LearningExtent(Extent):
    """How much of the benchmark a call measures."""

    presets: str = ""
    """Presets with commas; without it guess,nim,duel,panel,product,agent,python,retool,debate,search,mcp."""

    failures: str = ""
    """Fractions of the rollouts that are made to fail, with commas; without it 0,0.1."""

    steps: int | None = Field(None, ge=1)
    """Optimizer steps of a run after its warm-up. A run goes on after the target, so that curves compare.
    `None` leaves it to each preset."""

    cell_minutes: float = Field(20.0, gt=0)
    """Time limit of a run."""


Extents = Annotated[LearningExtent, Parameter(name="*", group=Group("Extent", sort_key=0))]


@bench.command(name=NAME, usage="Usage: launch bench learning [OPTIONS]")
def bench_learning(
    *, extent: Extents = LearningExtent(), settings: options.Settings = RunConfig(), as_json: AsJson = False
) -> None:
    """Measure how presets learn, and whether it changes when a share of their rollouts fails.

    Each preset, fraction and seed is a whole run of the real system from its warm-up on, and a line in
    docs/measurements/learning.jsonl, or without that directory in cells.jsonl of --directory (runs/learning).
    Runs that are there are not repeated, so that a later call goes on.

    Parameters
    ----------
    as_json
        Print one JSON object on one line.
    """
    from benchmarks.learning.bench import TABLE, measure_cells
    from benchmarks.learning.cells import FAILURES, PRESETS, SEEDS, chosen_fractions, grid
    from benchmarks.whole_runs.cells import chosen_names, chosen_numbers

    configure_logging("info")
    given = flags(settings)
    _refuse_own(given)
    cells = grid(
        chosen_names("--presets", extent.presets, PRESETS),
        chosen_fractions("--failures", extent.failures, FAILURES),
        chosen_numbers("--seeds", extent.seeds, SEEDS),
    )
    plan = plan_of(NAME, cells, extent, given)
    run_bench(
        NAME, partial(measure_cells, plan, steps=extent.steps),
        tables=plan.directory / TABLE, into=extent.into, as_json=as_json,
    )  # fmt: skip


def _refuse_own(given: Layer) -> None:
    refuse_own(given)
    if (given.get("learner") or {}).get("steps") is not None:
        raise ConfigError("--learner.steps: give --steps, which all runs of the benchmark have")
