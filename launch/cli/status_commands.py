"""`launch status`, `launch verify` and `launch tail`: how a live run is, and its trajectories."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from bus.errors import ConfigError
from launch.cli.app import AsJson, LiveRun, OfLiveRun, app
from launch.process.log_settings import configure_logging
from launch.process.runtime import run


@app.command(usage="Usage: launch status --run NAME [OPTIONS]")
def status(
    *,
    live_run: OfLiveRun = LiveRun(),
    as_json: AsJson = False,
) -> None:
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
    where = live_run.config()
    found = report(run(partial(look_at_run, where)))
    print(json.dumps(found) if as_json else screen(found))  # noqa: T201 - the user's terminal
    raise SystemExit(0 if found["healthy"] else 1)


@app.command(usage="Usage: launch verify --run NAME [--records DIR...] [OPTIONS]")
def verify(
    *,
    live_run: OfLiveRun = LiveRun(),
    records: tuple[Path, ...] = (),
    as_json: AsJson = False,
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


@app.command(usage="Usage: launch tail --run NAME [OPTIONS]")
def tail(
    *,
    live_run: OfLiveRun = LiveRun(),
    recent: Annotated[int, Parameter(name="--n", validator=Number(gte=0, lte=1000))] = 3,
    once: Annotated[bool, Parameter(name="--once", negative=())] = False,
    lease: Annotated[int | None, Parameter(name="--lease", validator=Number(gte=0))] = None,
    task: Annotated[str | None, Parameter(name="--task")] = None,
    as_json: AsJson = False,
    token_ids: Annotated[bool, Parameter(name="--token-ids", negative=())] = False,
) -> None:
    """Follow the trajectories of a live run as their groups become complete, with text, masks and versions.

    It takes nothing from the run. What is damaged or retired is named on stderr and left out. Ctrl-C ends it.

    Parameters
    ----------
    recent
        Number of trajectories that are stored already to show first.
    once
        End after those.
    lease
        Show the group of this lease only.
    task
        Show only trajectories whose prompt has this "id" or "task_id" in its metadata.
    as_json
        Print one JSON object a line, whose keys docs/operations.md describes.
    token_ids
        Add token ids and loss mask to the JSON objects.
    """
    from launch.screens.tail import TailOptions, lines, tail_run

    if token_ids and not as_json:
        raise ConfigError("--token-ids is for --json: give both")
    configure_logging("error")
    where = live_run.config()
    wanted = TailOptions(recent, once=once, lease=lease, task=task, token_ids=token_ids)
    write = json.dumps if as_json else lines
    run(partial(tail_run, where, wanted, lambda found: print(write(found), flush=True)))  # noqa: T201
