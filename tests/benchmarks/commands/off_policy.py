"""`launch bench staleness` and `launch bench reuse`: learning from old data, in many small runs."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter
from pydantic import Field

from benchmarks.commands.parts import AsJson, bench, show
from benchmarks.commands.whole_run import run_bench
from benchmarks.whole_runs.extent import Extent, plan_of, refuse_own
from bus.errors import ConfigError
from launch.cli import options
from launch.process.log_settings import configure_logging
from launch.process.runtime import run
from launch.settings.run_config import Layer, RunConfig, flags

if TYPE_CHECKING:
    from benchmarks.off_policy.bench import Kind

REUSE_METHODS, REUSE_LAGS, REUSES = "token_tis,decoupled,m2po", (1, 4, 8), (1, 2, 4)


class OffPolicyExtent(Extent):
    """How much of a benchmark a call measures."""

    steps: int = Field(200, ge=1)
    """Optimizer steps of a run, each of two updates."""


Extents = Annotated[OffPolicyExtent, Parameter(name="*", group=Group("Extent", sort_key=0))]


@bench.command(name="staleness", usage="Usage: launch bench staleness [OPTIONS]")
def bench_staleness(
    *,
    methods: str = "",
    lags: str = "",
    extent: Extents = OffPolicyExtent(),
    settings: options.Settings = RunConfig(),
    as_json: AsJson = False,
) -> None:
    """Measure how methods learn the demo from data that is exactly so many versions old.

    Each method, lag and seed is a run of the real system, and a line in docs/measurements/staleness.jsonl, or
    without that directory in cells.jsonl of --directory (runs/staleness). Runs that are there are not
    repeated, so that a later call goes on.

    Parameters
    ----------
    methods
        Methods with commas, such as none,token_tis; without it all.
    lags
        Versions that the sampling policy lags, with commas; without it 0,1,2,4,8,16,32.
    as_json
        Print one JSON object on one line.
    """
    from benchmarks.off_policy.cells import LAGS, chosen_methods
    from benchmarks.whole_runs.cells import chosen_numbers

    found = chosen_methods(methods), chosen_numbers("--lags", lags, LAGS), (1,)
    _measure("staleness", found, extent, flags(settings), as_json=as_json)


@bench.command(name="reuse", usage="Usage: launch bench reuse [OPTIONS]")
def bench_reuse(
    *,
    methods: str = REUSE_METHODS,
    lags: str = "",
    reuses: str = "",
    extent: Extents = OffPolicyExtent(),
    settings: options.Settings = RunConfig(),
    as_json: AsJson = False,
) -> None:
    """Measure how many tokens must be generated to learn the demo, if each is trained on several times.

    It works as `launch bench staleness` does, with `reuse` in the names. A lag is here the bound on the
    staleness, within which a group may be trained on again.

    Parameters
    ----------
    methods
        Methods with commas.
    lags
        Bounds on the staleness with commas; without it 1,4,8.
    reuses
        Steps that train on each group, with commas; without it 1,2,4.
    as_json
        Print one JSON object on one line.
    """
    from benchmarks.off_policy.cells import chosen_methods
    from benchmarks.whole_runs.cells import chosen_numbers

    found = (
        chosen_methods(methods),
        chosen_numbers("--lags", lags, REUSE_LAGS),
        chosen_numbers("--reuses", reuses, REUSES),
    )
    _measure("reuse", found, extent, flags(settings), as_json=as_json)


@bench.command(name="paired", usage="Usage: launch bench paired [OPTIONS]")
def bench_paired(
    *,
    methods: str = "",
    recorded_by: str = "token_tis",
    lag: int = 8,
    steps: int = 100,
    parallel: int = 1,
    settings: options.Settings = RunConfig(),
    as_json: AsJson = False,
) -> None:
    """Train methods on one recorded stream, and compare what each makes of the same batches.

    The stream is a run as in `launch bench staleness`, which is kept below --directory (runs/paired) and used
    again if it is there. Each method then trains its steps again, and answers the held-out prompts.

    Parameters
    ----------
    methods
        Methods with commas; without it all.
    recorded_by
        Method of the run that is the stream.
    lag
        Versions that the sampling policy lags there.
    steps
        Optimizer steps, each of two updates.
    parallel
        Methods at once. Each uses one core.
    as_json
        Print one JSON object on one line.
    """
    from benchmarks.off_policy.cells import Cell, chosen_methods
    from benchmarks.off_policy.paired import Stream, compare

    configure_logging("info")
    if lag < 0 or steps < 1 or parallel < 1:
        raise ConfigError(f"--lag {lag} --steps {steps} --parallel {parallel}: give 0, 1 and 1 at least")
    by, *more = chosen_methods(recorded_by)
    if more:
        raise ConfigError(f"--recorded-by {recorded_by}: name one method")
    given = flags(settings)
    _refuse_own(given)
    directory = Path(given.get("directory", "runs/paired")).absolute()
    stream = Stream(Cell(0, 1, lag, by), directory, given, steps)
    show(run(partial(compare, stream, chosen_methods(methods), parallel=parallel)), as_json=as_json)


def _refuse_own(given: Layer) -> None:
    refuse_own(given)
    if path := given.get("model", {}).get("path"):
        raise ConfigError(f"--model.path {path}: put the model that all runs begin from in DIRECTORY/model")


def _measure(
    kind: "Kind", wanted: tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]], extent: OffPolicyExtent,
    given: Layer, *, as_json: bool,
) -> None:  # fmt: skip
    from benchmarks.off_policy.bench import measure_cells
    from benchmarks.off_policy.cells import SEEDS, grid
    from benchmarks.whole_runs.cells import chosen_numbers

    configure_logging("info")
    _refuse_own(given)
    cells = grid(*wanted, chosen_numbers("--seeds", extent.seeds, SEEDS))
    plan = plan_of(kind, cells, extent, given)
    run_bench(
        kind, partial(measure_cells, plan, kind=kind, steps=extent.steps),
        tables=plan.directory / f"{kind}.md", into=extent.into, as_json=as_json,
    )  # fmt: skip
