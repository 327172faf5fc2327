"""Which runs the directories hold, how far each is, and which processes of this host have its files."""

import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from bus.codec import Json
from bus.errors import ConfigError, LostDataError, nearest
from launch.run_view.run_files import LatestStep, RunFiles, finite
from storage.disk.file_users import hidden_owner, processes_holding
from storage.disk.run_directory import is_run, run_directories, written_s

LOCKS = ("lock", "storage.lock", "replay/*/.lock")
"""Files that the processes of a run hold open on the host of its directory."""


@dataclass(frozen=True)
class RecordedRun:
    """How far a run is, by the files in its directory."""

    run: str
    state: str
    """`starting`, `training` and `waiting`: processes of this host hold its files, before and after its first
    step, or its learner has waited for a minute or longer, as `waits_for` says; `problem` names those of them
    that a signal has stopped;
    `finished`: its learner has ended by itself; `stopped`, `failed`: `problem` is the error if there was one;
    `lost`: its processes were killed, or their host went; `unseen`: it belongs to another user, or was
    started on another host, whose processes are not seen here, so that it may go on; `damaged`: a file of it
    cannot be read, as `problem` says."""
    directory: str
    started: float | None = None
    """Time of the first start, in seconds since the epoch."""
    starts: int = 0
    written: float | None = None
    """Time at which something was last recorded, in seconds since the epoch."""
    stepped: float | None = None
    """Time of the step that was recorded last, in seconds since the epoch: figures of the run are of then."""
    stage: str = "starting"
    step: int = 0
    """Steps of reinforcement learning; of a run on demonstrations alone those of its supervised stage."""
    steps: int | None = None
    policy_version: int = 0
    reward: float | None = None
    """Mean reward of the last ten steps."""
    accuracy: float | None = None
    """Held-out reward, sampled, of the version that was measured last."""
    pids: list[int] = field(default_factory=list)
    """Processes of this host that hold files of the run."""
    problem: str = ""
    waits_for: str = ""
    waits_since: float | None = None
    """Time at which that wait began, in seconds since the epoch."""
    note: str = ""
    origin: str = ""
    """Checkpoint of another run with whose weights it began, as run@step."""

    def to_json(self) -> dict[str, Json]:
        return asdict(self)


NO_RUNS = "there is none at all; name the directory of your runs with --directory"


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


def lock_files(path: Path) -> Iterator[Path]:
    for pattern in LOCKS:
        yield from path.glob(pattern)


def _recorded(path: Path, users: Mapping[Path, list[int]]) -> RecordedRun:
    pids = sorted({pid for lock in lock_files(path) for pid in users.get(lock, ())})
    try:
        return _read(RunFiles(path), pids)
    except LostDataError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename or path} cannot be read: {error.strerror}"
    return RecordedRun(path.name, "damaged", str(path), pids=pids, problem=problem)


def _state(files: RunFiles, latest: LatestStep, pids: list[int]) -> tuple[str, str]:
    if pids and files.waiting is not None:
        return "waiting", _suspended(pids)
    if pids:
        return "training" if latest.step or latest.warmup_step else "starting", _suspended(pids)
    if latest.stage == "done":
        return "finished", ""
    if hidden_owner(files.path) is not None:
        return "unseen", ""
    ending = files.ending
    if ending.state == "lost" and ending.host not in ("", platform.node()):
        return "unseen", ""
    return "stopped" if ending.state == "ended" else ending.state, ending.problem


def _suspended(pids: Iterable[int]) -> str:
    """Return which of these processes a signal has stopped; they do nothing until another one lets them."""
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                found.append(str(pid))
    pids_text = " ".join(found)
    return f"a signal has stopped processes of it: `kill -CONT {pids_text}` lets them go on" if found else ""


def _read(files: RunFiles, pids: list[int]) -> RecordedRun:
    path, starts, latest = files.path, files.starts, files.latest_step or LatestStep()
    state, problem = _state(files, latest, pids)
    waiting = files.waiting if state == "waiting" else None
    return RecordedRun(
        run=path.name,
        state=state,
        directory=str(path),
        started=starts[0].started.timestamp() if starts else None,
        starts=len(starts),
        written=written_s(path),
        stepped=files.newest_step_s,
        stage=latest.stage,
        step=files.trained_steps or 0,
        steps=files.planned_steps,
        policy_version=latest.policy_version,
        reward=finite(files.latest.recent_reward()),
        accuracy=files.accuracy,
        pids=pids,
        problem=problem,
        waits_for=waiting.waits_for if waiting else "",
        waits_since=waiting.since_s if waiting else None,
        note=files.note,
        origin=str(files.origin or ""),
    )


def named_holder(lock: Path) -> str:
    """Return the process id that its holder wrote into a lock file last; empty where none did."""
    return lock.read_text().partition("\n")[0] if lock.exists() else ""


def supervisor_of(path: Path) -> int | None:
    """Return the process that its own lock file names, if it still holds that: its number may be reused."""
    lock = path / "lock"
    text = named_holder(lock)
    named = int(text) if text.isdecimal() else None
    return named if named in processes_holding([lock]).get(lock, ()) else None


def going_on(path: Path, holder: int | str, remedy: str = "choose another --run") -> ConfigError:
    """Return the error of a start beside `holder`, the process that has the run of the directory `path`."""
    return ConfigError(
        f"run {path.name!r} is already going on in {path}, process {holder}: stop that first, or {remedy}"
    )


def bytes_of(path: Path) -> int:
    """Return the size of a file, or of all files below a directory, in bytes. What vanishes meanwhile, or
    cannot be read, does not count."""
    if not path.is_dir():
        return _size(path)
    return sum(_size(Path(above) / name) for above, _, files in os.walk(path) for name in files)


def _size(file: Path) -> int:
    with suppress(OSError):
        return file.stat().st_size
    return 0
