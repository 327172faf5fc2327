"""Checks whether the hosts of the learner's world see the same files."""

import time
from pathlib import Path

import torch
import torch.distributed as dist

from bus.errors import ConfigError
from learner.distributed.process_group import device
from storage.disk.atomic_files import make_directory

SEEN_WITHIN_S = 10.0
"""Network file systems show a new file to other hosts after some seconds."""


def refuse_unshared(directory: Path) -> None:
    """Raise `ConfigError` on every rank when one does not see what rank 0 writes in `directory`.

    Each rank writes its part of a checkpoint. Every rank calls this."""
    if dist.get_world_size() == 1:
        return
    number = torch.randint(1 << 62, (1,), device=device())
    dist.broadcast(number, 0)  # a new name each time: a mark of an earlier start proves nothing
    mark = directory / f".seen-{int(number):x}"
    if dist.get_rank() == 0:
        make_directory(directory)
        mark.touch()
    seen = torch.tensor(int(_appears(mark)), device=device())
    dist.all_reduce(seen)  # also waits until every rank has looked: only then may the mark go
    if dist.get_rank() == 0:
        mark.unlink()
    if int(seen) < dist.get_world_size():
        raise ConfigError(
            f"{dist.get_world_size() - int(seen)} ranks do not see rank 0's files in {directory}: the hosts "
            "of a learner share the run's directory; name one on a shared file system with --directory"
        )


def _appears(mark: Path) -> bool:
    deadline = time.monotonic() + SEEN_WITHIN_S
    while not mark.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
