"""`launch runs`: what a run leaves behind."""

from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from launch.cli.app import BusUrl, CredsFile, app, short_forms
from launch.config import validate
from launch.process.runtime import configure_logging, run

runs = App(name="runs", help="Remove what a run that has ended holds on a bus and on the disk.")
app.command(runs)


@runs.command(
    name="remove", usage="Usage: launch runs remove --run RUN [--bus URL] [--directory DIR] [--yes]"
)
def remove_command(
    *,
    run_name: Annotated[str, Parameter(name="--run")],
    bus: BusUrl = None,
    creds: CredsFile = None,
    directory: Path = Path("runs"),
    yes: Annotated[bool, Parameter(name="--yes", negative=())] = False,
) -> None:
    """Remove a run that has ended: its directory on this host and, with --bus or --creds, its streams there.

    Without --yes it only prints what it would remove.

    Parameters
    ----------
    run_name
        Name of the run.
    bus
        NATS server, as nats://[user:password@]host:port.
    directory
        Directory of all runs.
    yes
        Remove it. It cannot be brought back.
    """
    from launch.operations.run_removal import remove_run

    configure_logging("error")
    named = short_forms(bus, creds)
    where = validate({"run": run_name, "directory": directory}, named)
    found = run(partial(remove_run, where, bool(named), yes))
    print(found)  # noqa: T201 - the user's terminal
    print("removed" if yes else "nothing was removed: give --yes to remove it")  # noqa: T201
