"""What the files of a run's directory say of it: every command and every screen reads them here."""

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import psutil
import structlog
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from bus.codec import Json
from bus.errors import ConfigError, LostDataError
from launch.run_view.history import History, is_step, is_warmup
from launch.settings.run_config import RunConfig, config_file, resolve
from launch.settings.sources import by_name
from launch.settings.tree import settings_at
from storage.disk import checkpoints
from storage.disk.atomic_files import read_json
from storage.disk.run_directory import NOTE, PROGRESS_REMEDY, RunDirectory
from storage.metrics.records import Record, integer, latest_records, number, read_records

log = structlog.get_logger()
T = TypeVar("T")
TAIL_BYTES = 1 << 20
"""Bytes at the end of metrics.jsonl in which the latest step and evaluation are looked for."""
UNSET = "no default"
SETTINGS_REMEDY = "start the run again to write it"
PROVENANCE_REMEDY = "remove it: it only records what started the run"
ORIGIN_REMEDY = "write the run and the step into it from whose checkpoint the run began"
WAITING_REMEDY = "remove it: the learner writes it anew while it waits"
ENDING_REMEDY = "remove it: it only says how the latest launch ended"
NOT_COMPARED = ("run", "directory", "bus", "monitoring")
"""Settings that say where a run is, not what it is."""
GONE_OF_WEIGHTS = ("site", "via", "keep", "directory", "timeout_s")
"""Settings `actors.weights` of earlier builds: they said how weights travel, not what is trained."""


class Start(BaseModel):
    """What is read of each start of a run in its provenance.json."""

    started: datetime
    host: str | None = None
    git_commit: str | None = None
    argv: list[str] = []
    packages: dict[str, str | None] = {}
    changed: dict[str, tuple[Any, Any]] = {}
    """Settings that were other than at the start before: each as it was and as it became."""


class _Progress(BaseModel):
    """What progress.json has at least, where it has it."""

    stage: str | None = None
    step: int = 0
    policy_version: int = 0
    evaluations: dict[int, tuple[float | None, float | None]] = {}


class Ending(BaseModel):
    """How the latest launch of a run ended, as far as it could still say so."""

    state: str = "stopped"
    """`stopped`, `failed`, `ended` by itself, or `lost` while it goes on."""
    problem: str = ""
    """The error that ended it, or that came while it was stopped."""
    host: str = ""
    """Host of the launch, while it is `lost`."""


class Origin(BaseModel):
    """The checkpoint of another run with whose weights a run began."""

    run: str
    step: int
    """Step of reinforcement learning, 0 before the first; of a run on demonstrations alone its step."""
    warmup_step: int = 0
    """Steps on demonstrations before."""

    def __str__(self) -> str:
        """Return the origin as `model.from_run` takes it, for step 0 with the supervised steps."""
        taught = f" after {self.warmup_step} steps on demonstrations" if not self.step else ""
        return f"{self.run}@{self.step}{taught if self.warmup_step else ''}"


class Waiting(BaseModel):
    """What the learner of a run has waited for longer than a minute."""

    waits_for: str
    since_s: float
    """Seconds since the epoch."""


class _NotedWaiting(Waiting):
    """What the learner waits for, in its file, with the learner that noted it."""

    host: str = ""
    pid: int = 0


WAITING = TypeAdapter(_NotedWaiting)
STARTS, PROGRESS, ENDING = TypeAdapter(list[Start]), TypeAdapter(_Progress), TypeAdapter(Ending)
SETTINGS, ORIGIN = TypeAdapter(dict[str, Any]), TypeAdapter(Origin)


@dataclass(frozen=True)
class LatestStep:
    """The step that a run trained last."""

    stage: str = "starting"
    step: int = 0
    policy_version: int = 0
    warmup_step: int = 0
    """Steps of the supervised stage."""


class RunFiles:
    """One look at the files of a run: each file is read once, when it is first asked for. A garbled file
    raises `LostDataError`, and one that cannot be read `OSError`; with `lenient` such a file counts as
    missing, so that it hides neither what the others say nor other runs."""

    def __init__(self, path: Path, *, lenient: bool = False) -> None:
        self.path = path
        self._lenient = lenient

    @cached_property
    def starts(self) -> list[Start]:
        return self._json("provenance.json", STARTS, PROVENANCE_REMEDY)[1] or []

    @property
    def latest_start(self) -> Start | None:
        """Return the latest start by a user: `launch local` starts its storage by itself."""
        by_user = [start for start in self.starts if "--no-summary" not in start.argv]
        return next(reversed(by_user or self.starts), None)

    @cached_property
    def settings(self) -> dict[str, Json]:
        """Return the run's settings by name, such as learner.steps; none for a run that has recorded none."""
        return by_name(self._json("config.json", SETTINGS, SETTINGS_REMEDY)[1] or {})

    @property
    def learner_settings(self) -> dict[str, Json]:
        """Return the settings that the learner had when it last started; none where it never did."""
        return by_name(self._json("learner.json", SETTINGS, SETTINGS_REMEDY)[1] or {})

    @property
    def chosen_settings(self) -> dict[str, Json]:
        """Return the settings that are not the defaults, but for those of where the run is."""
        defaults = by_name(RunConfig().model_dump(mode="json"))
        return {
            name: value for name, value in self.settings.items()
            if name.partition(".")[0] not in NOT_COMPARED
            and value != (defaults[name] if name in defaults else _default_of_its_table(name))
        }  # fmt: skip

    @property
    def progress(self) -> dict[str, Json] | None:
        """Return what the learner wrote with its newest checkpoint or at its end; None before."""
        found: dict[str, Json] | None = self._progress[0]
        return found

    @cached_property
    def _progress(self) -> tuple[Any, _Progress | None]:
        return self._json("progress.json", PROGRESS, PROGRESS_REMEDY)

    @property
    def ending(self) -> Ending:
        """Return how the latest launch ended; `stopped` where a build noted nothing."""
        return self._json("ending.json", ENDING, ENDING_REMEDY)[1] or Ending()

    @property
    def note(self) -> str:
        """Return the user's note of the run; empty without one."""
        try:
            return (self.path / NOTE).read_text(errors="replace").strip()
        except FileNotFoundError:
            return ""

    @cached_property
    def waiting(self) -> Waiting | None:
        """Return what the learner waits for, if it noted a long wait; the note of one that was killed on this
        host is none."""
        noted = self._json("waiting.json", WAITING, WAITING_REMEDY)[1]
        if noted is None or not noted.pid or noted.host != platform.node():
            return noted
        return noted if psutil.pid_exists(noted.pid) else None

    @property
    def origin(self) -> Origin | None:
        """Return the checkpoint of another run that the run began with; None for its own first weights."""
        return self._json("model/origin.json", ORIGIN, ORIGIN_REMEDY)[1]

    @cached_property
    def latest_rows(self) -> list[Record]:
        return self._known(lambda: latest_records(self.path / "metrics.jsonl", TAIL_BYTES), [])

    @cached_property
    def latest(self) -> History:
        return History(self.latest_rows)

    @property
    def newest_step_s(self) -> float | None:
        """Return the time of the step recorded last, of either stage, in seconds since the epoch."""
        newest = next((row for row in reversed(self.latest_rows) if is_step(row) or is_warmup(row)), {})
        return finite(number(newest, "time_s"))

    def history(self) -> History:
        """Return every step and evaluation; of a long run this takes seconds."""
        metrics = self.path / "metrics.jsonl"
        return History(read_records(metrics) if metrics.exists() else ())

    def step(self, step: int) -> Record | None:
        """Return the figures of a step of reinforcement learning, as it was trained last; None where no line
        has it. Of a long run this takes seconds."""
        found = None
        for row in read_records(self.path / "metrics.jsonl"):
            if row.get("step") == step and row.get("train/stage") == "rl":
                found = row
        return found

    @property
    def latest_step(self) -> LatestStep | None:
        """Return the step of the newest checkpoint or the step recorded last, whichever is later; None where
        no file says one."""
        saved, last = self.progress, self.latest.last
        warmed = max((integer(row, "step") for row in self.latest_rows if is_warmup(row)), default=0)
        if saved is None and last is None and not warmed:
            return None
        saved = saved or {}
        stage = saved.get("stage")
        if last is not None and last.step > integer(saved, "step"):
            stage = "rl"  # also of a run that was done and goes on
        return LatestStep(
            stage=stage if isinstance(stage, str) else "warmup" if warmed else "starting",
            warmup_step=max(integer(saved, "warmup_step"), warmed),
            step=max(integer(saved, "step"), last.step if last else 0),
            policy_version=max(integer(saved, "policy_version"), last.policy_version if last else 0),
        )

    @property
    def trained_steps(self) -> int | None:
        """Return the steps so far, of a run on demonstrations alone those of its supervised stage; None where
        no file says any."""
        if (latest := self.latest_step) is None:
            return None
        return latest.warmup_step if self._is_supervised else latest.step

    @property
    def planned_steps(self) -> int | None:
        """Return the upper bound on the steps that `trained_steps` counts, where the settings are known."""
        value = self.settings.get("warmup.steps" if self._is_supervised else "learner.steps")
        return value if isinstance(value, int) else None

    @property
    def _is_supervised(self) -> bool:
        return self.settings.get("learner.steps") == 0

    @property
    def accuracy(self) -> float | None:
        """Return the held-out reward, sampled, of the version that was measured last; where no late row tells
        it, that of the newest checkpoint."""
        if measured := list(self.latest.evaluations.values()):
            return finite(measured[-1].sampled)
        saved = self._progress[1]
        return saved.evaluations[max(saved.evaluations)][0] if saved and saved.evaluations else None

    @property
    def saved_steps(self) -> list[int]:
        """Return the steps of the checkpoints, ascending; of a run on demonstrations alone those of its
        supervised stage, whose last one is the planned one."""
        root = self.path / "checkpoints"
        if not self._is_supervised:
            return checkpoints.steps(root)
        found = checkpoints.every_step(root)
        return [checkpoints.supervised(step) if step < 0 else self.planned_steps or 0 for step in found]

    def checkpoint(self, step: int) -> Path:
        root = self.path / "checkpoints"
        if not self._is_supervised:
            return checkpoints.directory(root, step)
        found = checkpoints.every_step(root)
        return checkpoints.directory(root, dict(zip(self.saved_steps, found, strict=True))[step])

    def _json(self, name: str, shape: TypeAdapter[T], remedy: str) -> tuple[Any, T | None]:
        """Return what a file holds, as it is and as its shape has it; None twice without that file."""

        def read() -> tuple[Any, T | None]:
            path = self.path / name
            try:
                return (found := read_json(path, remedy)), shape.validate_python(found)
            except FileNotFoundError:
                return None, None
            except ValidationError as error:
                [first, *_] = error.errors()
                where = ".".join(map(str, first["loc"])) or "the whole of it"
                raise LostDataError(
                    f"{path} has not the shape that a run writes ({where}: {first['msg']}): {remedy}"
                ) from error

        nothing: tuple[Any, T | None] = (None, None)
        return self._known(read, nothing)

    def _known(self, read: Callable[[], T], missing: T) -> T:
        try:
            return read()
        except (LostDataError, OSError) as error:
            if not self._lenient:
                raise
            log.debug("run_file_not_read", run=self.path.name, reason=str(error))
            return missing


def recorded_config(run: RunDirectory, config: Path | None = None) -> RunConfig:
    """Return the settings that the run's learner had when it last started, or those in the file `config`.
    Raises `ConfigError` when the run's directory is not here, is of another format, or does not say."""
    if not run.exists:
        raise ConfigError(f"there is no run {run.name!r} here: give --run, and --directory where runs lie")
    run.refuse_other_format()
    found = [config] if config else [path for path in (run.learner_config, run.config) if path.exists()]
    if not found:
        raise ConfigError(f"{run.path} does not hold the run's settings: give them with --config")
    recorded = config_file(found[0])
    weights = recorded.get("actors", {}).get("weights", {}) if config is None else {}
    for name in GONE_OF_WEIGHTS:
        weights.pop(name, None)
    try:
        return resolve(recorded, {"run": run.name})
    except ConfigError as error:
        raise ConfigError(f"{found[0]} has settings that this build does not take: {error}") from error


def changed_settings(before: Mapping[str, Json], config: RunConfig) -> dict[str, list[Json]]:
    """Return the settings, but for those of where a run is, that are other than `before`, each as it was and
    as it is; none of a run that has recorded none."""
    now = by_name(config.model_dump(mode="json"))
    return {
        name: [before.get(name), now.get(name)] for name in dict.fromkeys([*before, *now])
        if before and name.partition(".")[0] not in NOT_COMPARED and before.get(name) != now.get(name)
    }  # fmt: skip


def told_changes(changed: Mapping[str, Sequence[Json]]) -> list[str]:
    """Return each setting that changed, as `learner.steps: 4 -> 6`."""
    return [f"{name}: {' -> '.join(map(_told, values))}" for name, values in changed.items()]


def _told(value: Json) -> str:
    return "none" if value is None else str(value)


def _default_of_its_table(name: str) -> Json:
    """Return the default of a setting in a table that is not there by default, such as of another loss."""
    *above, last = name.split(".")
    field = settings_at(RunConfig, above).get(last)
    if field is None or field.is_required() or last == "type":
        return UNSET
    found: Json = to_jsonable_python(field.get_default(call_default_factory=True, validated_data={}))
    return found


def finite(value: float) -> float | None:
    """Return a number that was measured; None for NaN and infinity."""
    return value if isfinite(value) else None
