"""megatron-core's checkpoint writer without its processes.

Originally every save forks a process per file, and the first one spawns a manager that stays. In a learner
full of threads a fork may inherit a held lock and hang, and a spawn imports the main program again. Here the
state is copied, and a thread of the caller writes the copies.
"""

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX

from learner.backends.megatron.core.megatron_core import (
    FileSystemWriterAsync,
    filesystem_async,
    torch_dist_strategy,
)
from learner.host_memory.copies import CopyBuffers, StateCopies
from learner.model_directories.checkpoint_manifest import file_digest


class InProcessWriter(FileSystemWriterAsync):  # type: ignore[misc]  # megatron-core is untyped
    """Writes this rank's files one after another, each fsynced. `stage` copies their contents before."""

    def prepare_write_data(self, plan: Any, planner: Any) -> None:
        """Do what megatron-core's method of this name does, without its copies of all that is a view."""
        buckets = filesystem_async._split_by_size_and_type(self.thread_count, plan.items)
        names = (f"{plan.storage_data.prefix}{i}{DEFAULT_SUFFIX}" for i in range(len(buckets)))
        self.write_buckets = []
        for name, bucket in zip(names, filter(None, buckets), strict=False):
            resolved = [(item, planner.resolve_data(item)) for item in bucket]
            tensors = [(item, data.detach()) for item, data in resolved if isinstance(data, Tensor)]
            objects = [(item, data) for item, data in resolved if not isinstance(data, Tensor)]
            self.write_buckets.append((str(Path(self.checkpoint_dir, name)), name, (objects, tensors)))
        self.results_queue: queue.Queue[Any] | None = queue.Queue() if self.write_buckets else None

    @staticmethod
    def write_preloaded_data_multiproc(
        transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], results: "queue.Queue[Any]"
    ) -> None:
        """Do what megatron-core's method of this name does; put {bucket: results} or raise."""
        written: dict[int, Any] = {}
        for i, bucket in enumerate(buckets):
            outcomes: queue.Queue[Any] = queue.Queue()
            unfinished: queue.Queue[int] = queue.Queue()
            unfinished.put(i)
            FileSystemWriterAsync.write_preloaded_data(
                transforms, i, bucket, outcomes, unfinished, use_fsync=True
            )
            _, written[i] = outcomes.get_nowait()
            if isinstance(written[i], Exception):
                raise written[i]
        results.put(written)


def install_in_process_writer() -> None:
    """Make `dist_checkpointing.save` use `InProcessWriter`."""
    torch_dist_strategy.FileSystemWriterAsync = InProcessWriter


@dataclass(frozen=True)
class StagedWrites:
    """A rank's part of a checkpoint, which is not written yet."""

    writes: Callable[[], None]
    files: Sequence[Path]
    finalizers: Sequence[Callable[[], None]]
    copies: StateCopies
    """What is written: `keep` must be called before it changes."""

    def write(self) -> dict[str, str]:
        """Write this rank's files, without any collective; return their digests by name."""
        self.writes()
        return {file.name: file_digest(file) for file in self.files}

    def finalize(self) -> None:
        """Write the metadata of all files. Every rank calls this, on the thread of its collectives."""
        for finalizer in self.finalizers:
            finalizer()


def stage(request: Any, buffers: CopyBuffers) -> StagedWrites:
    """Begin to copy what `dist_checkpointing.save(..., async_sharded_save=True)` says is to be written."""
    if request.async_fn is None:
        return StagedWrites(lambda: None, [], request.finalize_fns, buffers.copies([]))
    rank, buckets, results = request.async_fn_args  # its own way to copy would pin the tensors one by one
    files = [Path(file) for file, *_ in buckets]
    tensors = [tensor for _, _, (_, parts) in buckets for _, tensor in parts]
    copies = buffers.copies(tensors)
    taken = map(copies.take, range(len(tensors)))
    contents = [
        (file, key, (objects, zip([item for item, _ in parts], taken, strict=False)))
        for file, key, (objects, parts) in buckets
    ]
    return StagedWrites(
        lambda: request.async_fn(rank, contents, results), files, request.finalize_fns, copies
    )
