"""megatron-core's checkpoint writer without its processes.

Stock, every save forks a process per file, and the first one spawns a manager that stays: in a learner full
of threads a fork may inherit a held lock and hang, and a spawn imports the main program again. Here the state
is copied and a thread of the caller's writes the copies.
"""

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from learner.manifest import file_digest
from learner.megatron import FileSystemWriterAsync, filesystem_async, torch_dist_strategy


class InProcessWriter(FileSystemWriterAsync):  # type: ignore[misc]  # megatron-core is untyped
    """Copies this rank's tensors, and writes its files one after another, each fsynced."""

    @staticmethod
    def preload_tensors(write_buckets: list[Any], non_blocking: bool = True) -> list[Any]:
        """Do what megatron-core's method of this name does, but copy what is in main memory too.

        The training that goes on would change it under the writer.
        """
        staged = []
        for file, key, (objects, tensors) in write_buckets:
            copies = [
                (item, tensor.to("cpu", non_blocking=non_blocking) if tensor.is_cuda else tensor.clone())
                for item, tensor in tensors
            ]
            staged.append((file, key, (objects, copies)))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return staged

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
    """A rank's part of a checkpoint, copied; nothing of it is written yet."""

    writes: Callable[[], None]
    files: Sequence[Path]
    finalizers: Sequence[Callable[[], None]]

    def write(self) -> dict[str, str]:
        """Write this rank's files, without any collective; return their digests by name."""
        self.writes()
        return {file.name: file_digest(file) for file in self.files}

    def finalize(self) -> None:
        """Write what describes all files. Every rank calls this, where its collectives are called."""
        for finalizer in self.finalizers:
            finalizer()


def stage(request: Any) -> Staged:
    """Copy what `dist_checkpointing.save(..., async_sharded_save=True)` says is to be written."""
    if request.async_fn is None:
        return Staged(lambda: None, [], request.finalize_fns)
    rank, _, results = request.async_fn_args
    buckets = request.preload_fn()

    def writes() -> None:
        request.async_fn(rank, buckets, results)
        buckets.clear()  # the copies are a second model

    return Staged(writes, [Path(file) for file, *_ in buckets], request.finalize_fns)
