"""`launch runs`: the runs of a directory, listed, shown, compared, noted, stopped and removed."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter
from cyclopts.validators import Number

from bus.errors import ConfigError
from launch.cli import options
from launch.cli.app import app, with_role_of
from launch.process.log_settings import configure_logging
from launch.process.runtime import run
from launch.settings.run_config import validate
from launch.settings.short_forms import short_forms

if TYPE_CHECKING:
    from rich.console import RenderableType

runs = App(name="runs", help="List, show, compare, note, stop and remove the runs of this host.")
app.command(runs)
GivenRun = Annotated[str, Parameter(name="--run", help="Name of the run.")]
"""Run of a command that takes none from the environment, because it ends or removes the run."""
Timeout = Annotated[float, Parameter(name="--timeout-s", validator=Number(gt=0))]
TABLE_WIDTH = 140
"""Columns of a table that goes to a file."""


@runs.command(name="list", usage="Usage: launch runs list [--directory DIR] [--json]")
def list_command(*, directory: options.RunsDirectory = Path("runs"), as_json: options.AsJson = False) -> None:
    """List the runs of a directory: how far each is, and whether it goes on.

    Parameters
    ----------
    as_json
        Print one JSON array on one line.
    """
    from launch.run_view.recorded_runs import recorded_runs
    from launch.screens.run_tables import list_table
    from storage.disk.run_directory import run_directories

    found = recorded_runs(run_directories(directory))
    if as_json:
        print(json.dumps([run.to_json() for run in found]))  # noqa: T201 - the user's terminal
    else:
        _show(list_table(found, directory))


@runs.command(name="show", usage="Usage: launch runs show --run RUN [--directory DIR] [--json]")
def show_command(
    *,
    run_name: options.RunName = "default",
    directory: options.RunsDirectory = Path("runs"),
    as_json: options.AsJsonObject = False,
) -> None:
    """Show what a run's directory tells: progress, results, checkpoints, disk, and settings of its own."""
    from launch.run_view.recorded_runs import find_run
    from launch.screens.run_tables import run_table, whole_run

    found = whole_run(find_run(directory, run_name))
    if as_json:
        print(json.dumps(found))  # noqa: T201 - the user's terminal
    else:
        _show(run_table(found))


@runs.command(name="compare", usage="Usage: launch runs compare RUN RUN... [--directory DIR] [--json]")
def compare_command(
    *names: str, directory: options.RunsDirectory = Path("runs"), as_json: options.AsJsonObject = False
) -> None:
    """Show runs side by side: results, also at the last step that all have, and settings that differ.

    Parameters
    ----------
    names
        Names of two runs or more.
    """
    from launch.run_view.recorded_runs import find_run
    from launch.screens.run_tables import comparison, comparison_table

    if len(names) < 2:
        raise ConfigError(f"{len(names) or 'no'} run to compare: give the names of two at least")
    found = comparison([find_run(directory, name) for name in names])
    if as_json:
        print(json.dumps(found))  # noqa: T201 - the user's terminal
    else:
        _show(comparison_table(found))


@runs.command(name="note", usage="Usage: launch runs note TEXT --run RUN [--directory DIR]")
def note_command(text: str, *, run_name: GivenRun, directory: options.RunsDirectory = Path("runs")) -> None:
    """Keep a note with a run, which lists and the page show.

    Parameters
    ----------
    text
        The note, instead of the one before; an empty one removes it.
    """
    from launch.run_view.recorded_runs import find_run
    from storage.disk.run_directory import RunDirectory

    RunDirectory(find_run(directory, run_name).parent, run_name).write_note(text)


@runs.command(name="stop", usage="Usage: launch runs stop --run RUN [--directory DIR] [--timeout-s S]")
def stop_command(
    *, run_name: GivenRun, directory: options.RunsDirectory = Path("runs"), timeout_s: Timeout = 180.0
) -> None:
    """Stop a run of `launch local` in order, as Ctrl-C in its terminal does, and wait for its end.

    Parameters
    ----------
    timeout_s
        Longest time to wait. The run goes on ending after it.
    """
    from launch.operations.run_stop import stop_run
    from launch.run_view.recorded_runs import find_run

    configure_logging("warning")
    print(stop_run(find_run(directory, run_name), timeout_s))  # noqa: T201 - the user's terminal


def _show(table: "RenderableType") -> None:
    """Print a table as wide as the terminal, and wide enough for a file."""
    from rich.console import Console

    width = None if Console().is_terminal else TABLE_WIDTH
    # notes, settings and errors may have brackets and colons, which mean nothing
    Console(width=width, markup=False, emoji=False, highlight=False).print(table)


@runs.command(
    name="remove", usage="Usage: launch runs remove --run RUN [--bus URL] [--directory DIR] [--yes]"
)
def remove_command(
    *,
    run_name: GivenRun,
    bus: options.BusUrl = None,
    creds: options.CredsFile = None,
    directory: options.RunsDirectory = Path("runs"),
    yes: Annotated[bool, Parameter(name="--yes", negative=())] = False,
) -> None:
    """Remove a run that has ended: its directory on this host and, with --bus or --creds, its streams there.

    Without --yes it only prints what it would remove.

    Parameters
    ----------
    yes
        Remove it. It cannot be brought back.
    """
    from launch.operations.run_removal import remove_run

    configure_logging("error")
    named = short_forms(bus, creds)
    where = with_role_of(validate({"run": run_name, "directory": directory}, named), ["operator"])
    found = run(partial(remove_run, where, bool(named), yes))
    print(found)  # noqa: T201 - the user's terminal
    print("removed" if yes else "nothing was removed: give --yes to remove it")  # noqa: T201
