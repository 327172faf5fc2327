"""`launch watch` and `launch dashboard`: the live view of a run, in the terminal and in a browser."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from bus.errors import ConfigError
from launch.cli import options
from launch.cli.app import READERS, LiveRun, OfLiveRun, app, with_bus_of_run, with_role_of
from launch.process.log_settings import configure_logging
from launch.process.runtime import run
from launch.settings.environment_variables import RUN_VARIABLE
from launch.settings.run_config import RunConfig, validate
from launch.settings.short_forms import short_forms


@app.command(usage="Usage: launch status --run NAME [OPTIONS]")
def status(*, live_run: OfLiveRun = LiveRun(), as_json: options.AsJson = False) -> None:
    """Show on one screen how a live run is, and what everyone waits for; from any host, in three seconds.

    The exit status is 0 for a healthy run or one that is done, 1 when something is missing or stuck, 2 for a
    mistake such as an unknown run, and 75 when the bus is away.

    Parameters
    ----------
    as_json
        Print one JSON object on one line, whose keys docs/operations.md describes.
    """
    from launch.run_view.run_status import look_at_run
    from launch.screens.status_report import report, screen

    configure_logging("error")
    where = live_run.live_config(*READERS)
    found = report(run(partial(look_at_run, where)))
    print(json.dumps(found) if as_json else screen(found))  # noqa: T201 - the user's terminal
    raise SystemExit(0 if found["healthy"] else 1)


@app.command(usage="Usage: launch verify --run NAME [--records DIR...] [OPTIONS]")
def verify(
    *, live_run: OfLiveRun = LiveRun(), records: tuple[Path, ...] = (), as_json: options.AsJson = False
) -> None:
    """Account for every trajectory: compare what actors sent, what is stored and what was trained on.

    The run may go on, or have ended; its stores, ledger and lineage are read from its directory. The exit
    status is 1 if a trajectory was lost, altered, used twice or is in no record, and 3 if records are not
    here, so that nothing says whether all is well.

    Parameters
    ----------
    records
        Directories with the account/ of other hosts of actors, copied here.
    as_json
        Print one JSON object on one line, which names everything that was found.
    """
    from launch.verify.comparison import status_of
    from launch.verify.verify import screen, verify_run

    configure_logging("error")
    where = live_run.config()
    found = run(partial(verify_run, where, records))
    print(json.dumps(found) if as_json else screen(found))  # noqa: T201 - the user's terminal
    raise SystemExit(status_of(found))


StepsDirectory = Annotated[
    options.RunsDirectory,
    Parameter(
        help="Directory of all runs. On the host of the run's storage it holds steps that the bus "
        "has no more."
    ),
]


@app.command(name="watch", usage="Usage: launch watch --run RUN [--bus URL] [--creds FILE] [--directory DIR]")
def watch_command(
    *,
    run_name: options.RunName,
    bus: options.RunBusUrl = None,
    creds: options.CredsFile = None,
    directory: StepsDirectory = Path("runs"),
) -> None:
    """Show on any host what `launch local` shows of a run: progress, rewards and what each process waits for.

    Ctrl-C ends the watching, not the run. Without a terminal it prints lines. It ends when the learner is
    done.
    """
    from launch.screens.watch import watch_run

    configure_logging("warning")
    where = with_bus_of_run({"run": run_name, "directory": directory, **short_forms(bus, creds)})
    run(partial(watch_run, with_role_of(validate(where), READERS)))


def located(name: str, *, directory: Path, given: Mapping[str, Any], named: str | None) -> RunConfig:
    """Return where the bus of a run of the dashboard is.

    The bus that was `given` is that of the `named` run. Without a named one it is that of each run whose
    config.json names none. Raises `ConfigError` for a bus whose password that file does not have."""
    run = {"run": name, "directory": directory}
    if name == named:
        return with_role_of(validate(with_bus_of_run({**run, **given})), READERS)
    try:
        own = with_bus_of_run(run)
    except ConfigError as error:
        raise ConfigError(f"{error}, and --run {name}") from error
    where = validate(own if own.get("bus") or named is not None else {**run, **given})
    return with_role_of(where, READERS)


@app.command(name="dashboard", usage="Usage: launch dashboard [--run RUN] [--directory DIR] [OPTIONS]")
def dashboard_command(  # noqa: PLR0913 - each is a flag
    *,
    run_name: Annotated[str | None, Parameter(name="--run", env_var=RUN_VARIABLE)] = None,
    bus: options.RunBusUrl = None,
    creds: options.CredsFile = None,
    directory: options.RunsDirectory = Path("runs"),
    host: str = "127.0.0.1",
    port: Annotated[int, Parameter(validator=Number(gte=0, lte=65535))] = 8765,
    certificate: options.Certificate = None,
    certificate_key: options.CertificateKey = None,
    show_token: options.ShowToken = False,
    insecure: options.Insecure = False,
) -> None:
    """Show the runs of a directory in a browser: curves, what waits for what and why, trajectories.

    It changes nothing in a run but its note, and removes one that is over, for readers with a token. Ctrl-C
    ends it. Beyond this host it asks for a token: that of --creds, or the one in $SLUICE_DASHBOARD_TOKEN.

    Parameters
    ----------
    run_name
        Name of the run to show first; one whose files are on another host is read from the bus.
    host
        Address to listen at.
    port
        Port to listen at; 0 takes any that is free.
    insecure
        Allow readers beyond this host without TLS.
    """
    from launch.dashboard.access import Address, dashboard_token
    from launch.dashboard.open_runs import OpenRuns
    from launch.dashboard.run_list import without_files
    from launch.dashboard.server import serve_dashboard
    from launch.operations.run_removal import remove_run
    from launch.run_view.served_page import noted_page

    configure_logging("error")
    token = dashboard_token(short_forms(bus, creds).get("bus", {}).get("creds"))
    if show_token:
        print(token or "no token is asked for: there are no credentials")  # noqa: T201 - the user's terminal
        return

    locate = partial(located, directory=directory, given=short_forms(bus, creds), named=run_name)

    def ready(url: str) -> None:
        if run_name is not None and (note := without_files(directory, run_name)):
            print(note, flush=True)  # noqa: T201 - the user's terminal
        page = url if run_name is None else f"{url}/#/runs/{run_name}"
        print(f"dashboard at {page}, Ctrl-C ends it", flush=True)  # noqa: T201 - the user's terminal
        noted.enter_context(noted_page(directory, url))

    async def remove(name: str) -> None:
        where = locate(name)
        has_own_bus = (where.directory / name / "bus").is_dir()  # which ended with the run
        await remove_run(where, not has_own_bus, True, asyncio.Event())

    runs = OpenRuns(directory, locate, run_name, remove=remove)
    address = Address(host, port, certificate, certificate_key)
    with ExitStack() as noted:
        run(partial(serve_dashboard, runs, address, token=token, insecure=insecure, ready=ready))
