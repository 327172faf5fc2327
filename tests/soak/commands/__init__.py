"""`launch soak`: faults in a real run, and the account of what they cost."""

import json
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

from cyclopts import Parameter

from bus.errors import ConfigError
from launch.cli.app import USAGE, app
from launch.process.log_settings import configure_logging
from launch.process.runtime import run

if TYPE_CHECKING:
    from bus.codec import Json  # it loads numpy, and --help is to be quick

TABLE_WIDTH = 140
"""Columns of a table that goes to a file."""


@app.command(usage=USAGE.format("soak"))
def soak(
    *,
    minutes: float | None = None,
    seed: int = 0,
    outages: tuple[float, float] = (15.0, 120.0),
    cluster: int = 1,
    compressed: Annotated[bool, Parameter(name="--compressed", negative=())] = False,
    rolling: float | None = None,
    directory: Path = Path("runs/soaks"),
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Inject faults into a real run, such as killed processes, and account for every trajectory afterwards.

    Parameters
    ----------
    minutes
        How long faults are injected, 15 by default; it goes on until there were seven faults a minute. With
        --compressed, how long the run takes, 60 by default; longer where its restarts are slow. With
        --rolling, how long actors are restarted, 60 by default.
    seed
        Seed of the random choice of faults and of their times.
    outages
        Shortest and longest time in seconds for which the bus is away.
    cluster
        Servers of the bus. With 3 each stream has 3 replicas, and a leader is killed every minute.
    compressed
        Measure growth instead: six weeks of steps in an hour, without faults but with restarts. The exit
        status is 1 when anything grows beyond what docs/operations.md states.
    rolling
        Restart all actors every so many seconds instead, by SIGTERM and SIGKILL, while rollouts take up to
        half as long. The exit status is 1 when a restart costs a prompt anything or biases lengths.
    directory
        Directory of all soaks; each leaves its run in a subdirectory.
    as_json
        Print the account as one JSON object on one line.
    """
    from soak.soak import SoakPlan, run_soak

    configure_logging("warning" if as_json else "info")
    if cluster not in (1, 3):
        raise ConfigError(f"--cluster {cluster}: a bus of a soak has 1 server or 3")
    if not 0 < outages[0] <= outages[1]:
        raise ConfigError(f"--outages {outages[0]:g} {outages[1]:g}: give the shortest, then the longest")
    here = directory / f"{time.strftime('%Y%m%d-%H%M%S')}-{seed}"
    if compressed and rolling is not None:
        raise ConfigError("--compressed and --rolling exclude each other: give one of them")
    if compressed:
        if cluster != 1:
            raise ConfigError(f"--cluster {cluster}: the bus of --compressed is one server")
        _soak_compressed(60.0 if minutes is None else minutes, seed, here, as_json)
    if rolling is not None:
        if cluster != 1:
            raise ConfigError(f"--cluster {cluster}: the bus of --rolling is one server")
        _soak_rolling(60.0 if minutes is None else minutes, rolling, here, as_json)
    plan = SoakPlan(
        minutes=15.0 if minutes is None else minutes, seed=seed, outages_s=outages, servers=cluster
    )
    _print_account(run(partial(run_soak, plan, here)), as_json)


def _print_account(result: "dict[str, Json]", as_json: bool) -> NoReturn:
    """Print the account of a soak, and exit with its status."""
    from soak.trajectory_account import exit_status

    print(json.dumps(result, indent=None if as_json else 2))  # noqa: T201 - the user's terminal
    raise SystemExit(exit_status(result))


def _soak_rolling(minutes: float, interval_s: float, directory: Path, as_json: bool) -> NoReturn:
    """Restart all actors every `interval_s` for so many minutes, print the account, and exit."""
    from soak.rolling import RollingPlan, run_rolling

    if not 0 < interval_s <= 60 * minutes:
        raise ConfigError(f"--rolling {interval_s:g}: it is the seconds between restarts, in {minutes:g} min")
    plan = RollingPlan(restarts=int(60 * minutes / interval_s), interval_s=interval_s)
    _print_account(run(partial(run_rolling, plan, directory)), as_json)


def _soak_compressed(minutes: float, seed: int, directory: Path, as_json: bool) -> NoReturn:
    """Run for so many minutes, print what grew, and exit; report.json beside the run has it, too."""
    from rich.console import Console

    from soak.growth.report import print_report
    from soak.growth.run import run_compressed
    from storage.disk.atomic_files import write_json

    report, verdicts = run(partial(run_compressed, minutes, seed, directory))
    write_json(directory / "report.json", report)
    if as_json:
        print(json.dumps(report))  # noqa: T201 - the user's terminal
    else:
        shown = Console()
        print_report(report, verdicts, shown if shown.is_terminal else Console(width=TABLE_WIDTH))
    raise SystemExit(1 if report["broken_statements"] else 0)
