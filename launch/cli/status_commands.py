"""`launch status`: shows how a live run is."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from launch.cli.app import CredsFile, RunBusUrl, app, short_forms, with_bus_of_run
from launch.config import validate
from launch.process.runtime import configure_logging, run


@app.command(usage="Usage: launch status --run NAME [OPTIONS]")
def status(
    *,
    run_name: Annotated[str, Parameter(name="--run")] = "default",
    bus: RunBusUrl = None,
    creds: CredsFile = None,
    directory: Path = Path("runs"),
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Show on one screen how a live run is, and what everyone waits for; from any host, in three seconds.

    The exit status is 0 for a healthy run or one that is done, 1 when something is missing or stuck, 2 for a
    mistake such as an unknown run, and 75 when the bus is away.

    Parameters
    ----------
    run_name
        Name of the run.
    directory
        Directory of all runs, where the run's config.json may name its bus.
    as_json
        Print one JSON object on one line, whose keys docs/operations.md describes.
    """
    from launch.operations.run_status import look_at_run
    from launch.operations.status_report import report, screen

    configure_logging("error")
    where = validate(with_bus_of_run({"run": run_name, "directory": directory, **short_forms(bus, creds)}))
    found = report(run(partial(look_at_run, where)))
    print(json.dumps(found) if as_json else screen(found))  # noqa: T201 - the user's terminal
    raise SystemExit(0 if found["healthy"] else 1)
