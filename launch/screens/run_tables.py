"""Tables of runs: a list, one run in full, and several side by side."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bus.codec import Json
from launch.run_view.history import History, Step
from launch.run_view.recorded_runs import NO_RUNS, RecordedRun, bytes_of, recorded_runs
from launch.run_view.run_files import NOT_COMPARED, RunFiles, Start, told_changes
from launch.run_view.served_page import page_of
from launch.run_view.units import UNKNOWN, duration, fraction, size

COLOURS = {"training": "green", "finished": "cyan", "unseen": "yellow", "waiting": "yellow"} | dict.fromkeys(
    ("damaged", "failed", "lost"), "red"
)
LONGEST = 80
"""Characters of a setting's value that a table shows."""
LONG_STEP_S = 60.0
"""Time since its newest step from which a run that goes on is told with it."""
RECENT_STEPS = 10
"""Steps over which a mean reward is taken."""


def list_table(runs: Sequence[RecordedRun], directory: Path) -> RenderableType:
    if not runs:
        return Text(f"no run in {directory}: {NO_RUNS}")
    table = Table(box=None, pad_edge=False)
    noted = ["note"] if any(run.note for run in runs) else []
    for column in ("run", "state", "stage", "step", "reward", "held-out", "started", "written", *noted):
        table.add_column(column, no_wrap=column in ("run", "state"))
    for run in runs:
        note = [_value(run.note)] if noted else []
        steps = f"{run.step}/{run.steps}" if run.steps is not None else str(run.step)
        table.add_row(
            run.run, Text(run.state, COLOURS.get(run.state, "")), run.stage, steps,
            fraction(run.reward), fraction(run.accuracy), at(run.started), ago(run.written), *note,
        )  # fmt: skip
    problems = [Text(f"{run.run}: {run.problem}", "red") for run in runs if run.problem]
    problems += [
        Text(f"{run.run}: {waiting_text(run.waits_for, run.waits_since)}", "yellow")
        for run in runs
        if run.waits_for
    ]
    problems += [
        Text(f"{run.run}: no step since {at(run.stepped)} ({ago(run.stepped)})", "yellow")
        for run in runs
        if run.pids and run.stepped and not run.waits_for and time.time() - run.stepped > LONG_STEP_S
    ]
    origins = [Text(f"{run.run} began with the weights of {run.origin}", "dim") for run in runs if run.origin]
    return Group(table, *problems, *origins)


def whole_run(path: Path) -> dict[str, Any]:
    [run] = recorded_runs([path])
    if run.state == "damaged":
        return run.to_json()
    files = RunFiles(path)
    last = files.latest_start
    return {
        **run.to_json(),
        "page": page_of(path.parent, path.name),
        "bus": files.settings.get("bus.url"),
        "host": last.host if last else None,
        "git_commit": last.git_commit if last else None,
        "packages": last.packages if last else {},
        "command": last.argv if last else [],
        "changed": told_changes(last.changed) if last else [],
        "settings": files.chosen_settings,
        "evaluations": {
            str(version): found.sampled for version, found in files.history().evaluations.items()
        },
        "checkpoints": files.saved_steps,
        "bytes": dict(_sizes(path)),
    }


def run_table(found: Mapping[str, Any]) -> Table:
    """Return what `whole_run` found, a line for each thing and for each setting that is not the default."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _facts(found):
        table.add_row(name, text)
    for name, value in found.get("settings", {}).items():
        table.add_row(f"  {name}", _value(value))
    return table


def _facts(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    pids = ", ".join(map(str, found["pids"]))
    yield "run", f"{found['run']}, {found['state']}{f', processes {pids}' if pids else ''}"
    yield "directory", found["directory"]
    if found["problem"]:
        yield "problem", found["problem"]
    if found["note"]:
        yield "note", found["note"]
    if found["waits_for"]:
        yield "waits", waiting_text(found["waits_for"], found["waits_since"])
    if found["state"] == "damaged":
        return
    if found["page"]:
        yield "page", found["page"]
    yield "started", f"{at(found['started'])} on {found['host']}"
    if found["origin"]:
        yield "began with", f"the weights of {found['origin']}"
    yield "written", ago(found["written"])
    yield "bus", str(found["bus"] or UNKNOWN)
    yield "code", str(found["git_commit"] or found["packages"].get("sluice-rl", UNKNOWN))
    yield "last command", " ".join(found["command"])
    if found["changed"]:
        yield "changed then", "\n".join(found["changed"])
    newest = f", {ago(found['stepped'])}" if found["stepped"] else ""
    yield "progress", f"{found['stage']}, step {found['step']} of {found['steps'] or UNKNOWN}{newest}"
    yield "reward", f"{fraction(found['reward'])}, mean of the last {RECENT_STEPS} steps"
    measured = list(found["evaluations"].items())[-5:]
    yield "held-out", ", ".join(f"{fraction(value)} at v{version}" for version, value in measured) or UNKNOWN
    yield (
        "checkpoints",
        f"of steps {', '.join(map(str, found['checkpoints']))}" if found["checkpoints"] else "none",
    )
    parts = sorted(found["bytes"].items(), key=lambda part: -part[1])
    yield (
        "disk",
        f"{size(sum(found['bytes'].values()))}: " + ", ".join(f"{n} {size(b)}" for n, b in parts[:5]),
    )
    yield "settings", "those that are not the defaults" if found["settings"] else "the defaults"


# --- side by side ---


def comparison(paths: Sequence[Path]) -> dict[str, Any]:
    """Return what differs between runs: settings, versions, and results also at the last step they share."""
    runs = recorded_runs(paths)
    files = [RunFiles(path) for path in paths]
    histories = [one.history() for one in files]
    shared = min((history.last.step if history.last else 0) for history in histories)
    return {
        "runs": [run.run for run in runs],
        "settings": _different_settings(files),
        "versions": _different([_versions(one.starts) for one in files]),
        "results": {
            "state": [run.state for run in runs],
            "step": [run.step for run in runs],
            "reward": [run.reward for run in runs],
            "accuracy": [run.accuracy for run in runs],
            "best_accuracy": [_best(history) for history in histories],
            "seconds_of_steps": [sum(step.step_s for step in _finite_steps(h)) for h in histories],
            "seconds_waiting": [sum(step.waiting_s for step in _finite_steps(h)) for h in histories],
        },
        "shared_step": shared,
        "at_shared_step": {
            "reward": [_reward_until(history, shared) for history in histories],
            "seconds": [_seconds_until(history, shared) for history in histories],
        },
    }


def comparison_table(found: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("", style="cyan", overflow="fold")
    for name in found["runs"]:
        table.add_column(name, overflow="fold")
    shown: Mapping[str, Callable[[Any], str]] = {
        "reward": fraction, "accuracy": fraction, "best_accuracy": fraction, "seconds": duration,
        "seconds_of_steps": duration, "seconds_waiting": duration,
    }  # fmt: skip
    for title, rows in (
        ("results", found["results"]),
        (f"at step {found['shared_step']}", found["at_shared_step"] if found["shared_step"] else {}),
        ("settings that differ", found["settings"]),
        ("versions that differ", found["versions"]),
    ):
        if rows:
            table.add_row(Text(title, "bold"))
        for name, values in rows.items():
            said = name if "." in name else name.replace("accuracy", "held-out").replace("_", " ")
            table.add_row(f"  {said}", *map(shown.get(name, _value), values))
    return table


def _different_settings(files: Sequence[RunFiles]) -> dict[str, list[Json]]:
    chosen = {name for one in files for name in one.chosen_settings}
    different = _different([one.settings for one in files])
    return {name: values for name, values in different.items() if name in chosen}


def _different(each: Sequence[Mapping[str, Json]]) -> dict[str, list[Json]]:
    """Return the entries in which the mappings differ; None where one has none."""
    names = dict.fromkeys(name for one in each for name in one)
    rows = {name: [one.get(name) for one in each] for name in names}
    return {
        name: values for name, values in rows.items()
        if any(value != values[0] for value in values) and name.partition(".")[0] not in NOT_COMPARED
    }  # fmt: skip


def _versions(starts: Sequence[Start]) -> dict[str, Json]:
    if not starts:
        return {}
    return {"commit": starts[-1].git_commit, "host": starts[-1].host, **starts[-1].packages}


def _finite_steps(history: History) -> list[Step]:
    return [step for step in history.steps.values() if isfinite(step.step_s) and isfinite(step.waiting_s)]


def _best(history: History) -> float | None:
    found = [one.sampled for one in history.evaluations.values() if isfinite(one.sampled)]
    return max(found, default=None)


def _reward_until(history: History, step: int) -> float | None:
    rewards = [s.reward_mean for s in history.steps.values() if s.step <= step and isfinite(s.reward_mean)]
    recent = rewards[-RECENT_STEPS:]
    return sum(recent) / len(recent) if recent else None


def _seconds_until(history: History, step: int) -> float | None:
    """Return the wall-clock time from the end of the first step to that of this one."""
    times = [s.time_s for s in history.steps.values() if s.step <= step and isfinite(s.time_s)]
    return times[-1] - times[0] if times else None


# --- words ---


def at(time_s: float | None) -> str:
    return UNKNOWN if time_s is None else f"{datetime.fromtimestamp(time_s).astimezone():%Y-%m-%d %H:%M}"


def ago(time_s: float | None) -> str:
    return UNKNOWN if time_s is None else f"{duration(max(0.0, time.time() - time_s))} ago"


def waiting_text(waits_for: str, since: float | None) -> str:
    return f"the learner is {waits_for}, since {at(since)} ({ago(since)})"


def _value(value: Json) -> str:
    if value is None:
        return UNKNOWN
    text = " ".join(str(value).split())
    return (
        text.lower() if isinstance(value, bool) else text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    )


def _sizes(path: Path) -> Iterator[tuple[str, int]]:
    for part in sorted(path.iterdir()):
        yield part.name, bytes_of(part)
