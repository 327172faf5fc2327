"""The runs of a directory, by the files that they write. Nothing is written, and no directory made."""

import time
from contextlib import suppress
from pathlib import Path

from bus.errors import ConfigError

MARKS = ("config.json", "metrics.jsonl", "provenance.json")
"""Files of which a run's directory has one at least."""
WRITTEN = (*MARKS, "counters.jsonl", "progress.json")
"""Files that show when something was last recorded."""


def run_directories(directory: Path) -> list[Path]:
    """Return the directories of all runs in `directory`, by name; those of other files are left out.

    Raises `ConfigError` for a directory that this user cannot read."""
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
        with suppress(OSError):  # it is missing, or was removed just now
            times.append((path / name).stat().st_mtime)
    return min(max(times), time.time()) if times else None
