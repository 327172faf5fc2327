"""`launch watch`: the live view of a run that goes on elsewhere."""

from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from launch.cli.app import CredsFile, RunBusUrl, app, short_forms, with_bus_of_run
from launch.config import validate
from launch.process.runtime import configure_logging, run


@app.command(name="watch", usage="Usage: launch watch --run RUN [--bus URL] [--creds FILE] [--directory DIR]")
def watch_command(
    *,
    run_name: Annotated[str, Parameter(name="--run")],
    bus: RunBusUrl = None,
    creds: CredsFile = None,
    directory: Path = Path("runs"),
) -> None:
    """Show on any host what `launch local` shows of a run: progress, rewards and what each process waits for.

    Ctrl-C ends the watching, not the run. Without a terminal it prints lines. It ends when the learner is
    done.

    Parameters
    ----------
    run_name
        Name of the run.
    directory
        Directory of all runs. On the host of the run's storage it holds steps that the bus has no more.
    """
    from launch.watch.remote import watch_run

    configure_logging("warning")
    where = with_bus_of_run({"run": run_name, "directory": directory, **short_forms(bus, creds)})
    run(partial(watch_run, validate(where)))
