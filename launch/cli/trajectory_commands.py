"""`launch tail`: the trajectories of a run in the terminal, searched, followed and exported."""

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from bus.errors import ConfigError
from launch.cli import options
from launch.cli.app import READERS, LiveRun, OfLiveRun, app
from launch.process.log_settings import configure_logging
from launch.process.runtime import run

if TYPE_CHECKING:
    from launch.trajectories.sources import TrajectorySource

WANTED = Group("Only trajectories", sort_key=2)


def _filter(name: str, text: str) -> Parameter:
    return Parameter(name=name, group=WANTED, help=text)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which trajectories are wanted, as the flags of `launch tail` say; all without any."""

    text: Annotated[str | None, _filter("--text", "With this text in prompts or answers, in any case.")] = (
        None
    )
    least_reward: Annotated[float | None, _filter("--reward-from", "With this reward or more.")] = None
    most_reward: Annotated[float | None, _filter("--reward-to", "With this reward or less.")] = None
    least_ratio: Annotated[
        float | None, _filter("--ratio-from", "With this mean importance ratio or more.")
    ] = None
    most_ratio: Annotated[float | None, _filter("--ratio-to", "With this mean importance ratio or less.")] = (
        None
    )
    step: Annotated[int | None, _filter("--step", "That this optimizer step trained on.")] = None
    version: Annotated[int | None, _filter("--policy-version", "Of which this version sampled a token.")] = (
        None
    )
    source: Annotated[str | None, _filter("--source", "Whose prompt is of this source.")] = None
    task: Annotated[
        str | None, _filter("--task", 'Whose prompt has this "id" or "task_id" in its metadata.')
    ] = None
    data_set: Annotated[str | None, _filter("--data-set", "Of this held-out set, with --held-out.")] = None
    held_out: Annotated[
        bool, Parameter(name="--held-out", negative=(), group=WANTED, help="That answer held-out prompts.")
    ] = False
    lease: Annotated[int | None, _filter("--lease", "Of the group of this lease.")] = None
    end: Annotated[str | None, _filter("--end", "That ended so, such as completed or length.")] = None
    below: Annotated[int | None, _filter("--below", "Of earlier leases than this, for older ones.")] = None


@app.command(usage="Usage: launch tail --run NAME [OPTIONS]")
def tail(
    *,
    live_run: OfLiveRun = LiveRun(),
    wanted: Annotated[Wanted, Parameter(name="*")] = Wanted(),
    recent: Annotated[int, Parameter(name="--n", validator=Number(gte=0, lte=1000))] = 3,
    once: Annotated[bool, Parameter(name="--once", negative=())] = False,
    table: Annotated[bool, Parameter(name="--table", negative=())] = False,
    export: Annotated[Path | None, Parameter(name="--export")] = None,
    as_json: options.AsJson = False,
    token_ids: Annotated[bool, Parameter(name="--token-ids", negative=())] = False,
) -> None:
    """Show trajectories of a run: the newest ones, and those that come as their groups become complete.

    It takes nothing from the run, which may have ended where its directory is here. What is damaged or
    retired is named on stderr and left out. It ends with the run, or by Ctrl-C.

    Parameters
    ----------
    recent
        Number of trajectories that are stored already to show first.
    once
        End after those.
    table
        Show a line each: prompt, answer, reward and its parts, advantage, version, length.
    export
        Write all of them to this .jsonl or .parquet file, or new directory that `datasets` reads, and end.
    as_json
        Print one JSON object a line, whose keys docs/operations.md describes.
    token_ids
        Add token ids and loss mask to JSON objects, and to an export the log-probs too.
    """
    from launch.screens.completion_table import CompletionTable
    from launch.screens.tail import TailOptions, lines, tail_run
    from launch.trajectories.export import export_run
    from launch.trajectories.search import TrajectoryFilter

    if token_ids and not (as_json or export):
        raise ConfigError("--token-ids is for --json and --export: give one of these too")
    configure_logging("error")
    if wanted.data_set and not wanted.held_out:
        raise ConfigError("--data-set is for answers to held-out prompts: give --held-out too")
    filters = asdict(wanted)
    source = _source(live_run, held_out=filters.pop("held_out"))
    chosen = TrajectoryFilter(**filters)
    if export is not None:
        count = run(partial(export_run, source, chosen, export, token_ids=token_ids))
        print(f"{count} trajectories in {export}")  # noqa: T201 - the user's terminal
        return
    shown = TailOptions(recent, once=once, wanted=chosen, token_ids=token_ids)
    write = json.dumps if as_json else CompletionTable() if table else lines
    run(partial(tail_run, source, shown, lambda found: print(write(found), flush=True)))  # noqa: T201


def _source(live_run: LiveRun, *, held_out: bool) -> "TrajectorySource":
    """Return what reads the trajectories: the stores in the run's directory, or else its shards."""
    from launch.trajectories.held_out import HeldOutTrajectories
    from launch.trajectories.sources import BusTrajectories, StoredTrajectories
    from launch.trajectories.stored_groups import has_stores
    from storage.disk.run_directory import RunDirectory

    directory = RunDirectory(live_run.directory, live_run.run_name)
    if held_out:
        return HeldOutTrajectories(directory)
    if has_stores(directory):
        return StoredTrajectories(directory)
    where = live_run.config(*READERS, "learner")
    return BusTrajectories(lambda: where, connect_s=where.bus.connect_timeout_s)
