"""`launch watch`: the live view of a run that goes on elsewhere."""

from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from launch.cli.app import BusUrl, CredsFile, app, short_forms
from launch.config import validate
from launch.process.runtime import configure_logging, run


@app.command(name="watch", usage="Usage: launch watch --run RUN [--bus URL] [--creds FILE] [--directory DIR]")
def watch_command(
    *,
    run_name: Annotated[str, Parameter(name="--run")],
    bus: BusUrl = None,
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
    bus
        NATS server, as nats://[user:password@]host:port; without it the one that the run's directory names.
    directory
        Directory of all runs. On the host of the run's storage it holds steps that the bus has no more.
    """
    from launch.watch.remote import bus_of_directory, watch_run
    from storage.disk.run_directory import RunDirectory

    configure_logging("warning")
    given = short_forms(bus, creds)
    if not given:
        given = bus_of_directory(RunDirectory(directory, run_name))
    run(partial(watch_run, validate({"run": run_name, "directory": directory}, given)))
