"""megatron-core's checkpoint writer without its processes.

Stock, every save forks a process per file, and the first one spawns a manager that stays: in a learner full
of threads a fork may inherit a held lock and hang, and a spawn imports the main program again.
"""

import queue
from typing import Any

from learner.megatron import FileSystemWriterAsync, filesystem_async, torch_dist_strategy


class InProcessWriter(FileSystemWriterAsync):  # type: ignore[misc]  # megatron-core is untyped
    """Writes this rank's files one after another, each fsynced."""

    @staticmethod
    def write_preloaded_data_multiproc(
        transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], results: "queue.Queue[Any]"
    ) -> None:
        """Do what megatron-core's method of this name does; put {bucket: results} or an exception."""
        written: dict[int, Any] = {}
        for i, bucket in enumerate(buckets):
            outcomes: queue.Queue[Any] = queue.Queue()
            unfinished: queue.Queue[int] = queue.Queue()
            unfinished.put(i)
            FileSystemWriterAsync.write_preloaded_data(
                transforms, i, bucket, outcomes, unfinished, use_fsync=True
            )
            _, written[i] = outcomes.get_nowait()
        failure = next((outcome for outcome in written.values() if isinstance(outcome, Exception)), None)
        results.put(failure or written)


def install_in_process_writer() -> None:
    """Make `dist_checkpointing.save` use `InProcessWriter`; calling it again is harmless."""
    results: queue.Queue[Any] = queue.Queue()
    filesystem_async._get_write_results_queue = lambda: results
    torch_dist_strategy.FileSystemWriterAsync = InProcessWriter
