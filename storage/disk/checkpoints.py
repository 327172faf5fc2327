"""Checkpoints as directories named by step, each there whole or not at all.

A save: fill `temporary(root, step)`, `replace` what `directory(root, step)` holds by it, then `prune`, and
`discard` what that returns. Steps of the supervised stage, which comes before the others, are numbers below 0
here (`supervised`)."""

import re
import shutil
from collections.abc import Container, Iterable
from pathlib import Path

from storage.disk.atomic_files import (
    TEMPORARY_PREFIX,
    make_directory,
    publish,
    remove,
    remove_leftovers,
    temporary_sibling,
)

__all__ = [
    "directory",
    "discard",
    "every_step",
    "latest",
    "prune",
    "recover",
    "replace",
    "set_aside",
    "steps",
    "supervised",
    "temporary",
]
KEPT_DAMAGED = 2
"""Damaged checkpoints that are kept for whoever wants to look at them."""
_NAME = re.compile(r"(step|warmup)_(\d{8,})")
_SUPERVISED = 10**8
_REPLACED = f"{TEMPORARY_PREFIX}replaced-"
_PRUNED = f"{TEMPORARY_PREFIX}pruned-"
_DAMAGED = "damaged-"


def directory(root: Path, step: int) -> Path:
    """Return where the checkpoint of `step` is, once published."""
    return root / (f"step_{step:08d}" if step >= 0 else f"warmup_{step + _SUPERVISED:08d}")


def supervised(step: int) -> int:
    """Return the number here of a step of the supervised stage, and of such a number the step."""
    return step - _SUPERVISED if step >= 0 else step + _SUPERVISED


def temporary(root: Path, step: int) -> Path:
    """Return where the checkpoint of `step` is prepared; made if missing, so several ranks may ask. One
    process calls `recover(root)` when it starts, before anybody saves."""
    path = temporary_sibling(directory(root, step))
    make_directory(path)
    return path


def replace(temporary: Path, final: Path) -> None:
    """Publish `temporary` in the place of `final`, durably. Raises `StorageError` when the disk refuses. A
    crash in between leaves the old checkpoint under another name, which `recover` takes back."""
    replaced = final.with_name(f"{_REPLACED}{final.name}")
    if final.exists():
        final.rename(replaced)
    publish(temporary, final)
    if replaced.exists():
        remove(replaced)


def recover(root: Path) -> None:
    """Remove what a crash left over, but for a checkpoint whose replacement it interrupted: that is back."""
    if not root.exists():
        return
    for replaced in root.glob(f"{_REPLACED}*"):
        final = replaced.with_name(replaced.name.removeprefix(_REPLACED))
        if not final.exists():
            replaced.rename(final)
    remove_leftovers(root)


def set_aside(root: Path, step: int) -> Path:
    """Rename a damaged checkpoint, which then counts as none; the oldest ones go. Return its new path."""
    aside = root / f"{_DAMAGED}{directory(root, step).name}"
    if aside.exists():
        remove(aside)
    directory(root, step).rename(aside)
    for old in sorted(root.glob(f"{_DAMAGED}*"))[:-KEPT_DAMAGED]:
        remove(old)
    return aside


def steps(root: Path) -> list[int]:
    """Return the steps of the published checkpoints, ascending; none when `root` is missing."""
    return [step for step in every_step(root) if step >= 0]


def every_step(root: Path) -> list[int]:
    """Return what `steps` does, behind those of the supervised stage."""
    if not root.exists():
        return []
    matches = (_NAME.fullmatch(path.name) for path in root.iterdir() if path.is_dir())
    found = ((match[1], int(match[2])) for match in matches if match)
    return sorted(step if kind == "step" else supervised(step) for kind, step in found)


def latest(root: Path) -> Path | None:
    found = every_step(root)
    return directory(root, found[-1]) if found else None


def prune(root: Path, keep: int, *, besides: Container[int] = ()) -> list[Path]:
    """Take the names from all checkpoints but the `keep` latest and those of the steps `besides`. Returns
    where their files are now, for `discard`, which takes seconds; after a crash `recover` does it."""
    if keep < 1:
        raise ValueError(f"keep={keep} would leave nothing to resume from: keep at least 1")
    old = [directory(root, step) for step in every_step(root)[:-keep] if step not in besides]
    return [path.rename(path.with_name(f"{_PRUNED}{path.name}")) for path in old]


def discard(pruned: Iterable[Path]) -> None:
    """Remove the files of what `prune` returned."""
    for path in pruned:
        shutil.rmtree(path)
