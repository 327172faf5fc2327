"""Commands that inspect a run, feed it, train its steps again, or test it."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from bus.config import MOST_PROFILED_STEPS
from bus.errors import ConfigError, SchemaError, SluiceError
from launch.cli import options
from launch.cli.app import USAGE, LiveRun, OfLiveRun, app, run_and_own_settings
from launch.cli.convert_commands import convert
from launch.process.log_settings import configure_logging
from launch.process.runtime import fail, run
from launch.settings.run_config import RetrainProcess

app.command(convert)


@app.command(usage=USAGE.format("retrain"))
def retrain(
    *,
    from_step: int = 0,
    to_step: int | None = None,
    config: options.ConfigFile = None,
    scores: str | None = None,
    as_json: options.AsJson = False,
    settings: options.RetrainSettings = RetrainProcess(),
) -> None:
    """Train steps of a run again from its directory, and compare batches and losses with those recorded.

    With other settings the report shows what the same batches give under another objective.

    Parameters
    ----------
    from_step
        First step to train; the latest checkpoint before it is loaded, or the initial model.
    to_step
        Last step to train; without it the run's last.
    config
        TOML or JSON file of the run's settings, for a run whose directory has none.
    scores
        Name of a table made by `launch rescore`, whose rewards replace those recorded.
    as_json
        Print the report, with each step, as one JSON object on one line.
    """
    from launch.operations.retrain import retrain as retrain_run
    from launch.operations.retrain import retrain_status, verdict
    from launch.run_view.run_files import recorded_config
    from storage.disk.run_directory import RunDirectory

    configure_logging("warning" if as_json else "info")
    where, changed = run_and_own_settings({}, settings, needs_bus=False)
    run_directory = RunDirectory(where.directory, where.run)
    recorded = recorded_config(run_directory, config)
    work = partial(retrain_run, run_directory, recorded, changed, (from_step, to_step), scores=scores)
    report = run(work)
    print(json.dumps(report) if as_json else verdict(report))  # noqa: T201 - the user's terminal
    raise SystemExit(retrain_status(report))


@app.command(usage="Usage: launch witness [GROUP] --run RUN [OPTIONS]")
def witness(
    group: str | None = None,
    /,
    *,
    run_name: options.RunName = "default",
    directory: options.RunsDirectory = Path("runs"),
    as_json: options.AsJsonObject = False,
) -> None:
    """Tell from the weights of a checkpoint how often a group was trained on: once, never or twice.

    Its step, and those up to that checkpoint, are trained again three times. The exit status is 1 unless the
    answer is once.

    Parameters
    ----------
    group
        Name of the group, such as g00000012, or of one of its trajectories, g00000012.3; without it the
        newest in a checkpoint whose rewards differ.
    """
    from launch.operations.retrain import ask_witness
    from launch.run_view.run_files import recorded_config
    from storage.disk.run_directory import RunDirectory

    configure_logging("warning")
    lease = None if group is None else lease_of(group)
    run_directory = RunDirectory(directory, run_name)
    report = ask_witness(run_directory, recorded_config(run_directory), lease)
    print(json.dumps(report, indent=None if as_json else 2))  # noqa: T201 - the user's terminal
    raise SystemExit(0 if report["trained"] == "once" else 1)


def lease_of(name: str) -> int:
    """Return the lease of a group or trajectory by its name; raises `ConfigError` for any other name."""
    from bus.messages import parse_trajectory_name

    try:
        return parse_trajectory_name(name if "." in name else f"{name}.0")[0]
    except SchemaError as error:
        raise ConfigError(
            f"{name} names no group: write it as g00000012, or as one of its trajectories"
        ) from error


@app.command(usage=USAGE.format("restore"))
def restore(
    *,
    run_name: options.RunName = "default",
    directory: options.RunsDirectory = Path("runs"),
    archive: str | None = None,
) -> None:
    """Restore the trajectories that a run's replay has archived. Its storage must be stopped.

    Parameters
    ----------
    archive
        Directory or fsspec URL of the archive; without it the run's replay.archive.
    """
    from launch.operations.retrain import restore_run
    from storage.disk.run_directory import RunDirectory

    try:
        restored = restore_run(RunDirectory(directory, run_name), archive)
    except SluiceError as error:
        fail(error)
    print("\n".join(restored) or "nothing was retired")  # noqa: T201 - the user's terminal


@app.command(usage="Usage: launch data --run NAME --prompts FILE [--keep-old]")
def data(
    *,
    prompts: Path,
    live_run: OfLiveRun = LiveRun(),
    keep_old: Annotated[bool, Parameter(name="--keep-old", negative=())] = False,
) -> None:
    """Give a running run other prompts, from its next lease on.

    The change outlives restarts.

    Parameters
    ----------
    prompts
        File of training prompts, .jsonl or .parquet, with the field names of the run.
    keep_old
        Append these prompts to the present ones instead of replacing them.
    """
    from launch.operations.live_run import add_data

    configure_logging("warning")
    where = live_run.live_config("operator")
    accepted = run(partial(add_data, where, prompts, keep_old))
    if accepted is not None:
        print(f"{accepted.prompts} prompts, from lease {accepted.first_lease} on")  # noqa: T201 - the user's


@app.command(usage="Usage: launch profile --run NAME [--steps N] [--timeout-s S]")
def profile(
    *,
    steps: Annotated[int, Parameter(validator=Number(gte=1, lte=MOST_PROFILED_STEPS))] = 3,
    live_run: OfLiveRun = LiveRun(),
    timeout_s: Annotated[float, Parameter(name="--timeout-s", validator=Number(gt=0))] = 600.0,
) -> None:
    """Trace the next steps of a live learner: what takes their time.

    Every rank writes a trace, and of a GPU's memory a snapshot, below `profiles` in the run's directory on
    the learner's host. Training goes on; it waits while the files are written.

    Parameters
    ----------
    steps
        Number of steps to trace, from the next one on.
    timeout_s
        Seconds to wait for these steps.
    """
    from launch.operations.live_run import take_profile

    configure_logging("warning")
    found = run(partial(take_profile, live_run.live_config(), steps, timeout_s))
    print("\n".join([*found.lines, f"written to {found.directory}"]))  # noqa: T201 - the user's terminal


@app.command(name="reward", usage="Usage: launch reward [FILE] --run RUN [OPTIONS]")
def reward_command(
    file: Path = Path("-"), /, *, live_run: OfLiveRun = LiveRun(), as_json: options.AsJsonObject = False
) -> None:
    """Give rewards to trajectories that were published without one.

    Each line is an object like {"trajectory_id": "g00000012.3", "reward": 0.5}. A reward may be given twice.

    Parameters
    ----------
    file
        File of JSON Lines; - reads standard input, each line as it comes.
    """
    from launch.operations.give_rewards import give_rewards

    configure_logging("warning")
    given = run(partial(give_rewards, live_run.live_config("judge", "operator"), file))
    account = {"taken": given.taken, "refused": len(given.refused)}
    summary = f"{given.taken} rewards given, {len(given.refused)} lines refused"
    print(json.dumps(account) if as_json else summary, flush=True)  # noqa: T201 - the user's terminal
    if given.refused:
        fail(*(ConfigError(refusal) for refusal in given.refused))


@app.command(usage="Usage: launch rescore --run RUN [--reward NAME] [OPTIONS]")
def rescore(  # noqa: PLR0913 - each is a flag
    *,
    run_name: options.RunName = "default",
    reward: Annotated[str | None, Parameter(name="--reward")] = None,
    from_step: int | None = None,
    to_step: int | None = None,
    leases: str | None = None,
    name: str | None = None,
    model: Path | None = None,
    directory: options.RunsDirectory = Path("runs"),
    as_json: options.AsJsonObject = False,
) -> None:
    """Score the stored answers of an interval again with another reward, into a named table; needs no bus.

    Parameters
    ----------
    reward
        Name of a built-in reward, or a function of your own as my_pkg.my_module:function. Without it each
        group is scored with the rewards of the environment that made it.
    from_step
        First optimizer step whose groups are scored; without it the run's first.
    to_step
        Last optimizer step; without it the run's last.
    leases
        Range of leases, such as 0-255, instead of steps, whether a step trained on them or not.
    name
        Name of the table, <run>/scores/<name>.jsonl; without it the reward's, or own-rewards.
    model
        Directory with the run's tokenizer; without it the run's model.
    """
    from launch.operations.rescore import Interval, parse_leases, run_rescore

    configure_logging("warning")
    if leases is not None and (from_step is not None or to_step is not None):
        raise ConfigError("--leases and steps exclude each other: give one of them")
    interval = Interval(from_step, to_step, parse_leases(leases) if leases is not None else None)
    work = partial(run_rescore, directory, run_name, reward, interval, name=name, model=model)
    result = run(work)
    print(json.dumps(result.to_json()) if as_json else result)  # noqa: T201 - the user's terminal
