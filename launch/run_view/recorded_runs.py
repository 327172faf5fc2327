"""What the directories of runs tell: which there are, how far each is, and with which settings."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from bus.codec import Json
from bus.errors import ConfigError, LostDataError
from launch.run_view.history import History
from launch.run_view.latest_step import latest_history, latest_step
from launch.settings.run_config import RunConfig, config_file, resolve
from launch.settings.sources import by_name
from launch.settings.tree import nearest, settings_at
from storage.disk import checkpoints
from storage.disk.atomic_files import read_json
from storage.disk.file_users import hidden_owner, processes_holding
from storage.disk.run_directory import PROGRESS_REMEDY, RunDirectory, is_run, run_directories, written_s
from storage.metrics.records import read_records

T = TypeVar("T")
LOCKS = ("lock", "replay/*/.lock")
"""Files that the processes of a run hold open on the host of its directory."""
UNSET = "no default"
PROVENANCE_REMEDY = "remove it: it only records what started the run"
NOT_COMPARED = ("run", "directory", "bus", "monitoring")
"""Settings that say where a run is, not what it is."""


@dataclass(frozen=True)
class RecordedRun:
    """How far a run is, by the files in its directory."""

    run: str
    state: str
    """`running`: processes of this host hold its files; `done`: its learner has ended by itself; `stopped`;
    `unseen`: it belongs to another user, whose processes this one cannot see, so that it may go on;
    `damaged`: a file of it cannot be read, as `problem` says."""
    directory: str
    started: float | None = None
    """Time of the first start, in seconds since the epoch."""
    starts: int = 0
    written: float | None = None
    """Time at which something was last recorded, in seconds since the epoch."""
    stage: str = "starting"
    step: int = 0
    steps: int | None = None
    """Upper bound on the steps."""
    policy_version: int = 0
    reward: float | None = None
    """Mean reward of the last ten steps."""
    accuracy: float | None = None
    """Held-out reward, sampled, of the version that was measured last."""
    pids: list[int] = field(default_factory=list)
    """Processes of this host that hold files of the run."""
    problem: str = ""

    def to_json(self) -> dict[str, Json]:
        """Return it as one object."""
        return asdict(self)


class Start(BaseModel):
    """What is read of each start of a run in its provenance.json."""

    started: datetime
    host: str | None = None
    git_commit: str | None = None
    argv: list[str] = []
    packages: dict[str, str | None] = {}


class _Progress(BaseModel):
    """What is read of progress.json."""

    stage: str | None = None
    step: int = 0
    policy_version: int = 0
    evaluations: dict[int, tuple[float | None, float | None]] = {}


NO_RUNS = "there is none at all; name the directory of your runs with --directory"
STARTS, PROGRESS = TypeAdapter(list[Start]), TypeAdapter(_Progress)
SETTINGS = TypeAdapter(dict[str, Any])


def find_run(directory: Path, name: str) -> Path:
    """Return a run's directory. Raises `ConfigError` for a name that cannot be one, and with the nearest name
    when there is none."""
    if Path(name).name != name:
        raise ConfigError(
            f"run name {name!r} is a path: give the name alone, and the directory above it with --directory"
        )
    path = directory / name
    if not is_run(path):
        there = [found.name for found in run_directories(directory)]
        known = f"there are: {', '.join(there)}" if there else NO_RUNS
        raise ConfigError(f"no run {name!r} in {directory}: {nearest(name, there)}{known}")
    return path


def recorded_runs(paths: Iterable[Path]) -> list[RecordedRun]:
    """Return how far each run is; one whose files are garbled is `damaged`."""
    paths = list(paths)
    users = processes_holding(lock for path in paths for lock in lock_files(path))
    return [_recorded(path, users) for path in paths]


def history_of(path: Path) -> History:
    """Return every step and evaluation of a run."""
    metrics = path / "metrics.jsonl"
    return History(read_records(metrics) if metrics.exists() else ())


def settings_of(path: Path) -> dict[str, Json]:
    """Return a run's settings by name, such as learner.steps; none for a run that has recorded none.

    Raises `LostDataError` when the file that records them is garbled."""
    recorded = _json(path / "config.json", SETTINGS, "start the run again to write it")
    return by_name(recorded or {})


def starts_of(path: Path) -> list[Start]:
    """Return each start of a run, the first one first. Raises `LostDataError` when their file is garbled."""
    return _json(path / "provenance.json", STARTS, PROVENANCE_REMEDY) or []


def chosen_settings(settings: Mapping[str, Json]) -> dict[str, Json]:
    """Return the settings that are not the defaults, but for those of where the run is."""
    defaults = by_name(RunConfig().model_dump(mode="json"))
    return {
        name: value for name, value in settings.items()
        if name.partition(".")[0] not in NOT_COMPARED
        and value != (defaults[name] if name in defaults else _default_of_its_table(name))
    }  # fmt: skip


def _default_of_its_table(name: str) -> Json:
    """Return the default of a setting in a table that is not there by default, such as of another loss."""
    *above, last = name.split(".")
    field = settings_at(RunConfig, above).get(last)
    if field is None or field.is_required() or last == "type":
        return UNSET
    found: Json = to_jsonable_python(field.get_default(call_default_factory=True, validated_data={}))
    return found


def saved_steps(path: Path) -> list[int]:
    """Return the steps of a run's checkpoints, ascending."""
    root = path / "checkpoints"
    return checkpoints.steps(root) if root.is_dir() else []


def lock_files(path: Path) -> Iterator[Path]:
    """Yield the files of a run that its processes hold open."""
    for pattern in LOCKS:
        yield from path.glob(pattern)


def _recorded(path: Path, users: Mapping[Path, list[int]]) -> RecordedRun:
    pids = sorted({pid for lock in lock_files(path) for pid in users.get(lock, ())})
    try:
        return _read(path, pids)
    except LostDataError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename or path} cannot be read: {error.strerror}"
    return RecordedRun(path.name, "damaged", str(path), pids=pids, problem=problem)


def _read(path: Path, pids: list[int]) -> RecordedRun:
    starts = starts_of(path)
    progress = _json(path / "progress.json", PROGRESS, PROGRESS_REMEDY) or _Progress()
    history = latest_history(path / "metrics.jsonl")
    latest = latest_step(progress.model_dump(mode="json"), history)
    return RecordedRun(
        run=path.name,
        state="running" if pids else "done" if latest.stage == "done" else _state_without_processes(path),
        directory=str(path),
        started=starts[0].started.timestamp() if starts else None,
        starts=len(starts),
        written=written_s(path),
        stage=latest.stage,
        step=latest.step,
        steps=_steps(settings_of(path).get("learner.steps")),
        policy_version=latest.policy_version,
        reward=_finite(history.recent_reward()),
        accuracy=_accuracy(history, progress),
        pids=pids,
    )


def _accuracy(history: History, progress: _Progress) -> float | None:
    """Return the accuracy measured last; where no late row tells it, that of the newest checkpoint."""
    if history.evaluations:
        return _finite(list(history.evaluations.values())[-1].sampled)
    saved = progress.evaluations
    return saved[max(saved)][0] if saved else None


def _state_without_processes(path: Path) -> str:
    return "stopped" if hidden_owner(path) is None else "unseen"


def _json(path: Path, shape: TypeAdapter[T], remedy: str) -> T | None:
    """Return what a file holds; None without that file. Raises `LostDataError` for JSON of another shape."""
    try:
        return shape.validate_python(read_json(path, remedy))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        [first, *_] = error.errors()
        where = ".".join(map(str, first["loc"])) or "the whole of it"
        raise LostDataError(
            f"{path} has not the shape that a run writes ({where}: {first['msg']}): {remedy}"
        ) from error


def _steps(value: Json) -> int | None:
    return value if isinstance(value, int) else None


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def recorded_config(run: RunDirectory, config: Path | None = None) -> RunConfig:
    """Return the settings that the run's learner had when it last started, or those in the file `config`.

    Raises `ConfigError` when the run's directory is not here, is of another format, or does not say.
    """
    if not run.exists:
        raise ConfigError(f"there is no run {run.name!r} here: give --run, and --directory where runs lie")
    run.refuse_other_format()
    found = [config] if config else [path for path in (run.learner_config, run.config) if path.exists()]
    if not found:
        raise ConfigError(f"{run.path} does not hold the run's settings: give them with --config")
    return resolve(config_file(found[0]), {"run": run.name})


def saved_progress(run: RunDirectory) -> dict[str, Json] | None:
    """Return what the learner wrote when it last ended."""
    path = run.path / "progress.json"
    if not path.exists():
        return None
    progress: dict[str, Json] = read_json(path, PROGRESS_REMEDY)
    return progress


def supervisor_of(path: Path) -> int | None:
    """Return the process that its own lock file names, if it still holds that: its number may be reused."""
    lock = path / "lock"
    text = lock.read_text().strip() if lock.exists() else ""
    named = int(text) if text.isdecimal() else None
    return named if named in processes_holding([lock]).get(lock, ()) else None


def going_on(path: Path, holder: int, remedy: str = "choose another --run") -> ConfigError:
    """Return the error of a start beside `holder`, the process that has the run of the directory `path`."""
    return ConfigError(
        f"run {path.name!r} is already going on in {path}, process {holder}: stop that first, or {remedy}"
    )


def bytes_of(path: Path) -> int:
    """Return the size of a file, or of all files below a directory, in bytes.

    What vanishes meanwhile, or cannot be read, does not count."""
    if not path.is_dir():
        return _size(path)
    return sum(_size(Path(above) / name) for above, _, files in os.walk(path) for name in files)


def _size(file: Path) -> int:
    with suppress(OSError):
        return file.stat().st_size
    return 0
