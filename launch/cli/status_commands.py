"""`launch status` and `launch verify`: how a live run is, and whether each trajectory is accounted for."""

import json
from functools import partial
from pathlib import Path

from launch.cli.app import READERS, AsJson, LiveRun, OfLiveRun, app
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
    where = live_run.live_config(*READERS)
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
