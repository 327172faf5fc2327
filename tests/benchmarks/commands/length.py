"""`launch bench length`: whether answers run away when the data is old, in many small runs."""

from functools import partial
from typing import Annotated

from cyclopts import Group, Parameter
from pydantic import Field

from benchmarks.commands.parts import AsJson, bench
from benchmarks.commands.whole_run import run_bench
from benchmarks.whole_runs.extent import Extent, plan_of, refuse_own
from launch.cli import options
from launch.process.log_settings import configure_logging
from launch.settings.run_config import RunConfig, flags

NAME = "length"


class LengthExtent(Extent):
    """How much of the benchmark a call measures."""

    methods: str = ""
    """Methods with commas; without it none,token_tis,sequence_tis,decoupled,cispo,ppo_clip,dppo_tv."""

    lags: str = ""
    """Versions that the sampling policy lags, with commas; without it 0,8."""

    cut_off: str = ""
    """What becomes of answers that are cut off, with commas; without it wrong,left_out."""

    steps: int = Field(60, ge=1)
    """Optimizer steps of a run, each of two updates."""


Extents = Annotated[LengthExtent, Parameter(name="*", group=Group("Extent", sort_key=0))]


@bench.command(name=NAME, usage="Usage: launch bench length [OPTIONS]")
def bench_length(
    *, extent: Extents = LengthExtent(), settings: options.Settings = RunConfig(), as_json: AsJson = False
) -> None:
    """Measure whether the length of answers runs away when longer ones pay and the data is old.

    Each method, lag, rule and seed is a whole run of the real system from its warm-up on, and a line in
    docs/measurements/length.jsonl, or without that directory in cells.jsonl of --directory (runs/length).
    Runs that are there are not repeated, so that a later call goes on.

    Parameters
    ----------
    as_json
        Print one JSON object on one line.
    """
    from benchmarks.length.bench import TABLE, measure_cells
    from benchmarks.length.cells import CUT_OFF, LAGS, METHODS, SEEDS, grid
    from benchmarks.whole_runs.cells import chosen_names, chosen_numbers

    configure_logging("info")
    given = flags(settings)
    refuse_own(given)
    rules = chosen_names("--cut-off", extent.cut_off, CUT_OFF)
    cells = grid(
        chosen_names("--methods", extent.methods, METHODS),
        chosen_numbers("--lags", extent.lags, LAGS),
        [rule for rule in CUT_OFF if rule in rules],
        chosen_numbers("--seeds", extent.seeds, SEEDS),
    )
    plan = plan_of(NAME, cells, extent, given)
    run_bench(
        NAME, partial(measure_cells, plan, steps=extent.steps),
        tables=plan.directory / TABLE, into=extent.into, as_json=as_json,
    )  # fmt: skip
