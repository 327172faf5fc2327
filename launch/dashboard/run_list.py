"""What the files of runs say of each. Nothing is written, and no directory made."""

import json
from pathlib import Path

import structlog

from bus.codec import Json
from bus.errors import ConfigError
from launch.run_view.history import History
from launch.run_view.latest_step import latest_history, latest_step
from storage.disk.run_directory import RunDirectory, run_directories, written_s
from storage.metrics.records import Record, last_record

log = structlog.get_logger()


def run_names(root: Path) -> list[str]:
    """Return the names of the runs in the directory, the latest used first.

    Raises `ConfigError` for a directory that this user cannot read."""
    found = filter(_is_name, run_directories(root))
    return [path.name for path in sorted(found, key=lambda path: written_s(path) or 0.0, reverse=True)]


def without_files(root: Path, name: str) -> str | None:
    """Return what to tell who asks for a run of which the directory has no files, or None where it has some.

    Raises `ConfigError` for what cannot be a run's name."""
    if RunDirectory(root, name).exists:
        return None
    here = ", ".join(run_names(root)) or "no runs"
    return f"{root} has no files of run {name!r}, so its page shows what the bus knows; {root} has {here}"


def run_facts(root: Path, name: str) -> dict[str, Json]:
    """Return what the files of a run say of it: each fact is null where no file says it."""
    run, path = RunDirectory(root, name), root / name
    summary, progress = _read(path / "summary.json"), _read(path / "progress.json")
    config, starts = _read(path / "config.json"), _read(path / "provenance.json")
    start = starts[0] if isinstance(starts, list) and starts and isinstance(starts[0], dict) else {}
    history = _history(run)
    latest = latest_step(progress if isinstance(progress, dict) else {}, history)
    known = isinstance(progress, dict) or history.last is not None
    return {
        "run": name,
        "here": run.exists,
        "stage": latest.stage if known else None,
        "step": latest.step if known else None,
        "steps": _get(_get(config, "learner"), "steps"),
        "policy_version": latest.policy_version if known else None,
        "started": start.get("started"),
        "host": start.get("host"),
        "commit": start.get("git_commit"),
        "command": start.get("argv"),
        "packages": start.get("packages"),
        "used_s": written_s(path) if run.exists else None,
        "last_time_s": _last_row(run).get("time_s"),
        "heldout": _get(summary, "heldout_accuracy_end") or _last_evaluation(progress),
        "max_staleness": _get(_get(config, "admission"), "max_staleness"),
        "target_accuracy": _get(_get(config, "learner"), "target_accuracy"),
        "bus": _has_bus(config),
    }


def _last_row(run: RunDirectory) -> Record:
    try:
        return (last_record(run.metrics) if run.exists else None) or {}
    except OSError as error:  # a file that is somebody else's must not hide the other runs
        log.debug("metrics_not_read", run=run.name, reason=str(error))
        return {}


def _history(run: RunDirectory) -> History:
    try:
        return latest_history(run.metrics) if run.exists else History()
    except OSError as error:
        log.debug("metrics_not_read", run=run.name, reason=str(error))
        return History()


def _last_evaluation(progress: Json) -> Json:
    evaluations = _get(progress, "evaluations")
    if not isinstance(evaluations, dict) or not evaluations:
        return None
    newest = evaluations[max(evaluations, key=int)]
    return newest[0] if isinstance(newest, list) and newest else None


def _has_bus(config: Json) -> bool:
    bus = _get(config, "bus")
    return bool(_get(bus, "url") or _get(bus, "creds"))


def _read(path: Path) -> Json:
    """Return the object of a JSON file; None where it is missing, or being written."""
    try:
        found: Json = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found


def _get(table: Json, name: str) -> Json:
    return table.get(name) if isinstance(table, dict) else None


def _is_name(path: Path) -> bool:
    try:
        RunDirectory(path.parent, path.name)
    except ConfigError:
        return False
    return True
