"""Checkpoints as directories named by step, each there whole or not at all.

A save: fill `temporary(root, step)`, then `publish` it to `directory(root, step)`, then `prune`."""

import re
from pathlib import Path

from storage.disk.atomic_files import make_directory, publish, remove, remove_leftovers, temporary_sibling

__all__ = ["directory", "latest", "prune", "publish", "remove_leftovers", "steps", "temporary"]

_NAME = re.compile(r"step_(\d{8,})")


def directory(root: Path, step: int) -> Path:
    """Return where the checkpoint of `step` is, once published."""
    return root / f"step_{step:08d}"


def temporary(root: Path, step: int) -> Path:
    """Return where the checkpoint of `step` is prepared; made if missing, so several ranks may ask.

    One process calls `remove_leftovers(root)` when it starts, before anybody saves."""
    path = temporary_sibling(directory(root, step))
    make_directory(path)
    return path


def steps(root: Path) -> list[int]:
    """Return the steps of the published checkpoints, ascending; none when `root` is missing."""
    if not root.exists():
        return []
    matches = (_NAME.fullmatch(path.name) for path in root.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def latest(root: Path) -> Path | None:
    """Return the checkpoint of the highest step."""
    found = steps(root)
    return directory(root, found[-1]) if found else None


def prune(root: Path, keep: int) -> list[int]:
    """Remove all checkpoints but the `keep` latest; return the steps removed."""
    if keep < 1:
        raise ValueError(f"keep={keep} would leave nothing to resume from: keep at least 1")
    old = steps(root)[:-keep]
    for step in old:
        remove(directory(root, step))
    return old
