"""What the files of runs say of each. Nothing is written, and no directory made."""

from collections.abc import Sequence
from pathlib import Path

from bus.codec import Json
from bus.errors import ConfigError
from launch.run_view.recorded_runs import RecordedRun, recorded_runs
from launch.run_view.run_files import RunFiles, told_changes
from storage.disk.run_directory import RunDirectory, run_directories, written_s


def run_names(root: Path) -> list[str]:
    """Return the names of the runs in the directory, the latest used first. Raises `ConfigError` for a
    directory that this user cannot read."""
    found = filter(_is_name, run_directories(root))
    return [path.name for path in sorted(found, key=lambda path: written_s(path) or 0.0, reverse=True)]


def without_files(root: Path, name: str) -> str | None:
    """Return what to tell who asks for a run of which the directory has no files, or None where it has some.
    Raises `ConfigError` for what cannot be a run's name."""
    if RunDirectory(root, name).exists:
        return None
    here = ", ".join(run_names(root)) or "no runs"
    return f"{root} has no files of run {name!r}, so its page shows what the bus knows; {root} has {here}"


def facts_of_runs(root: Path, names: Sequence[str]) -> list[dict[str, Json]]:
    """Return what the files of runs say of each: a fact is null where no file says it."""
    here = {name: RunDirectory(root, name).exists for name in names}
    return [_facts(run, here[run.run]) for run in recorded_runs(root / name for name in names)]


def _facts(run: RecordedRun, here: bool) -> dict[str, Json]:
    files = RunFiles(Path(run.directory), lenient=True)
    latest, settings = files.latest_step, files.settings
    start = files.starts[0] if files.starts else None
    return {
        "run": run.run,
        "here": here,
        "state": run.state if here else None,
        "problem": run.problem,
        "waits_for": run.waits_for,
        "waits_since": run.waits_since,
        "note": run.note,
        "origin": run.origin,
        "stage": latest.stage if latest else None,
        "step": files.trained_steps,
        "steps": files.planned_steps,
        "policy_version": latest.policy_version if latest else None,
        "started": start.started.isoformat() if start else None,
        "host": start.host if start else None,
        "commit": start.git_commit if start else None,
        "command": [*start.argv] if start else None,
        "changed": [*told_changes(files.latest_start.changed)] if files.latest_start else [],
        "packages": {**start.packages} if start else None,
        "used_s": written_s(files.path),
        "last_time_s": files.latest_rows[-1].get("time_s") if files.latest_rows else None,
        "reward": run.reward,
        "heldout": files.accuracy,
        "max_staleness": settings.get("admission.max_staleness"),
        "target_accuracy": settings.get("learner.target_accuracy"),
        "bus": bool(settings.get("bus.url") or settings.get("bus.creds")),
    }


def _is_name(path: Path) -> bool:
    try:
        RunDirectory(path.parent, path.name)
    except ConfigError:
        return False
    return True
