"""A file without a name that holds optimizer state: it is gone when the process is, however that ends.

An update reads and writes it piece by piece, in threads; everything else (a checkpoint, say) finds the same
bytes in memory that is mapped to the file.
"""

import errno
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from bus.errors import ConfigError, TrainingError

CHUNK_BYTES = 16 * 2**20
"""Bytes that one thread reads or writes at a time."""
THREADS = 4
TIMEOUT_S = 300.0
"""Longest time that a piece may take, which is some hundred megabytes."""


class Transfer:
    """Bytes on their way between memory and a file."""

    def __init__(self, what: str, parts: Sequence[Future[None]]) -> None:
        self._what = what
        self._parts = parts

    def wait(self) -> None:
        """Wait until all of them have arrived. Raises `TrainingError` if they cannot, or take too long."""
        try:
            for part in self._parts:
                part.result(TIMEOUT_S)
        except TimeoutError as error:
            raise TrainingError(
                f"{self._what} took more than {TIMEOUT_S:.0f} s: the disk hangs or is too slow; name a "
                "faster one in optimizer.offload_directory, or none"
            ) from error
        except OSError as error:
            raise TrainingError(
                f"{self._what} failed ({error}): repair the disk or name another one in "
                "optimizer.offload_directory; the run goes on from its latest checkpoint"
            ) from error


class StateFile:
    """Float32 numbers on a disk, zeros at first."""

    def __init__(self, directory: Path, numbers: int) -> None:
        """Take the room for them at once. Raises `ConfigError` where there is none."""
        self._directory = directory
        size = 4 * numbers
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _check_room(directory, size)  # before a part of it is taken from others in vain
            self._file, name = tempfile.mkstemp(dir=directory, prefix="optimizer-state-")
            weakref.finalize(self, os.close, self._file)
            try:
                os.posix_fallocate(self._file, 0, size)
                self.mapped = torch.from_file(name, shared=True, size=numbers, dtype=torch.float32)
                """float32 [numbers], the content, read and written by way of the page cache."""
            finally:
                Path(name).unlink()
        except OSError as error:
            raise ConfigError(
                f"optimizer.offload_directory={directory} cannot take the {size / 1e9:.1f} GB of one "
                f"rank's optimizer state ({error}): name a directory on another disk, or none"
            ) from error
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="optimizer-state")
        weakref.finalize(self, self._threads.shutdown, wait=False)

    def read(self, into: Tensor, start: int) -> Transfer:
        """Begin to copy the numbers from `start` on into contiguous memory."""
        return self._transfer("reading", os.preadv, into, start)

    def write(self, numbers: Tensor, start: int) -> Transfer:
        """Begin to replace the numbers from `start` on; these must stay as they are until it has ended."""
        return self._transfer("writing", os.pwritev, numbers, start)

    def _transfer(
        self, what: str, call: Callable[[int, list[memoryview], int], int], memory: Tensor, start: int
    ) -> Transfer:
        content, first = memory.numpy().data.cast("B"), 4 * start
        parts = [
            self._threads.submit(_all_of, call, self._file, content[at : at + CHUNK_BYTES], first + at)
            for at in range(0, len(content), CHUNK_BYTES)
        ]
        return Transfer(f"{what} {len(content) / 1e6:.1f} MB of optimizer state in {self._directory}", parts)


def _all_of(
    call: Callable[[int, list[memoryview], int], int], file: int, content: memoryview, start: int
) -> None:
    while content:
        done = call(file, [content], start)
        if not done:
            raise OSError(errno.EIO, "the file ends too early")
        content, start = content[done:], start + done


def _check_room(directory: Path, size_bytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if size_bytes > free:
        raise OSError(errno.ENOSPC, f"only {free / 1e9:.1f} GB are free")
