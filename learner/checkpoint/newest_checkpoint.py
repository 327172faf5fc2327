"""The checkpoint that a learner goes on from: the newest one that is whole, the same on all ranks."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog
import torch.distributed as dist

from bus.errors import LostDataError, SluiceError, StorageError
from learner.checkpoint.commit import damaged_on_any_rank
from learner.distributed.process_group import gathered
from learner.model_directories.checkpoint_manifest import read_manifest
from learner.progress.progress import checkpoint_step
from storage.disk import checkpoints

log = structlog.get_logger()
SEEN_WITHIN_S = 60.0
"""Longest time until a rank sees what rank 0 sees: a network file system may show a new file late."""
POLL_S = 0.2


def newest_whole(root: Path) -> Path | None:
    """Return the newest checkpoint in `root` whose files are all as they were written, if there is any.

    Every rank calls this. Rank 0 chooses, and each rank reads its share of the files. Newer checkpoints that
    are torn or damaged are set aside under another name. Raises `LostDataError` when there are checkpoints
    and none is whole, and `StorageError` when a rank does not see what rank 0 sees."""
    if dist.get_rank() == 0:
        checkpoints.recover(root)
        _name_supervised(root)
    found = _of_rank_0(checkpoints.every_step(root))
    damaged: dict[int, str] = {}
    for step in reversed(found):
        directory = checkpoints.directory(root, step)
        if not (damage := _damage(directory)):
            _set_aside(root, damaged)
            return directory
        damaged[step] = damage
    if damaged:
        raise LostDataError(
            f"no checkpoint in {root} is whole: {'; '.join(damaged.values())}. Restore one of them, or move "
            "the directory away to begin again"
        )
    return None


def _name_supervised(root: Path) -> None:
    """Name a checkpoint of the supervised stage by its step. Earlier builds named all of them by step 0,
    which counts as newer than the steps that follow in that stage."""
    first = checkpoints.directory(root, 0)
    with suppress(SluiceError):  # an unreadable checkpoint is told when its turn comes
        saved = read_manifest(first)["extra"]
        if saved.get("stage") == "warmup":
            checkpoints.replace(first, checkpoints.directory(root, checkpoint_step(saved)))


def _damage(directory: Path) -> str:
    """Return what is wrong with a checkpoint, the same on every rank; nothing if it is whole. Raises, on
    every rank too, what rank 0 cannot read for another reason than damage."""
    found: Any = None
    if dist.get_rank() == 0:
        try:
            found = read_manifest(directory)
        except SluiceError as error:  # raised on every rank: one that raised alone would leave others waiting
            found = error
    found = _of_rank_0(found)
    if isinstance(found, LostDataError):
        return str(found)
    if isinstance(found, SluiceError):
        raise found
    _refuse_unseen(directory, found)
    names = damaged_on_any_rank(directory, found)
    return f"the bytes of {', '.join(sorted(names))} in {directory} are not those written" if names else ""


def _refuse_unseen(directory: Path, manifest: dict[str, Any]) -> None:
    """Raise `StorageError` on every rank when one does not see the files of `manifest` in time."""
    deadline = time.monotonic() + SEEN_WITHIN_S
    missing = list(manifest["files"])
    while missing and time.monotonic() < deadline:
        missing = [name for name in missing if not (directory / name).is_file()]
        if missing:
            time.sleep(POLL_S)
    blind = [f"rank {rank} lacks {names[0]}" for rank, names in enumerate(gathered(missing)) if names]
    if blind:
        raise StorageError(
            f"{'; '.join(blind)} of checkpoint {directory}, which rank 0 sees: does every host of the "
            "learner mount the same --directory?"
        )


def _set_aside(root: Path, damaged: dict[int, str]) -> None:
    """Give damaged checkpoints another name: nobody goes on from them, and they are not counted as kept."""
    for step, damage in damaged.items():
        if dist.get_rank() == 0:
            aside = checkpoints.set_aside(root, step)
            log.error(
                "checkpoint_damaged", damage=damage, set_aside=str(aside), remedy="going on from an older one"
            )
    dist.barrier()  # nobody saves before the names are free


def _of_rank_0(value: Any) -> Any:
    """Return rank 0's `value`. Every rank calls this."""
    return gathered(value)[0]
