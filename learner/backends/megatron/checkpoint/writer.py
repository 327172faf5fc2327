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

from learner.backends.megatron.core import FileSystemWriterAsync, filesystem_async, torch_dist_strategy
from learner.checkpoint.copies import CopyBuffers
from learner.checkpoint.manifest import file_digest


class InProcessWriter(FileSystemWriterAsync):  # type: ignore[misc]  # megatron-core is untyped
    """Writes this rank's files one after another, each fsynced. `stage` copies their contents before."""

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
    """Make `dist_checkpointing.save` use `InProcessWriter`, each with a queue of its own for its results."""
    filesystem_async._get_write_results_queue = queue.Queue
    torch_dist_strategy.FileSystemWriterAsync = InProcessWriter


@dataclass(frozen=True)
class Staged:
    """Copies of a rank's part of a checkpoint, which are not written yet."""

    writes: Callable[[], None]
    files: Sequence[Path]
    finalizers: Sequence[Callable[[], None]]

    def write(self) -> dict[str, str]:
        """Write this rank's files, without any collective; return their digests by name."""
        self.writes()
        return {file.name: file_digest(file) for file in self.files}

    def finalize(self) -> None:
        """Write the metadata of all files. Every rank calls this, on the thread of its collectives."""
        for finalizer in self.finalizers:
            finalizer()


def stage(request: Any, buffers: CopyBuffers) -> Staged:
    """Copy what `dist_checkpointing.save(..., async_sharded_save=True)` says is to be written."""
    if request.async_fn is None:
        return Staged(lambda: None, [], request.finalize_fns)
    rank, buckets, results = request.async_fn_args  # its own way to copy would pin the tensors one by one
    copies = iter(buffers.copied([tensor for _, _, (_, tensors) in buckets for _, tensor in tensors]))
    parts = [
        (file, key, (objects, [(item, next(copies)) for item, _ in tensors]))
        for file, key, (objects, tensors) in buckets
    ]

    def writes() -> None:
        request.async_fn(rank, parts, results)
        parts.clear()  # copies outside the buffers are as large as what was copied

    return Staged(writes, [Path(file) for file, *_ in parts], request.finalize_fns)
