"""A file without a name that holds optimizer state: it is gone when the process is, however that ends.

An update reads and writes it piece by piece, in threads; everything else (a checkpoint, say) finds the same
bytes in memory that is mapped to the file."""

import errno
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import numpy as np
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
        """Wait until all bytes have arrived. Raises `TrainingError` if they cannot, or take too long."""
        for part in self._parts:
            try:
                failure = part.exception(TIMEOUT_S)
            except TimeoutError as error:
                raise TrainingError(
                    f"{self._what} took more than {TIMEOUT_S:.0f} s: the disk hangs or is too slow; name a "
                    "faster one in optimizer.offload_directory, or none"
                ) from error
            if isinstance(failure, OSError):
                raise TrainingError(
                    f"{self._what} failed ({failure}): repair the disk or name another one in "
                    "optimizer.offload_directory; the run goes on from its latest checkpoint"
                ) from failure
            if failure is not None:
                raise failure


_Call = Callable[[int, list[memoryview], int], int]
"""`os.preadv` or `os.pwritev`."""
_Queue = SimpleQueue[Callable[[], None] | None]
"""What the threads of a file are to do; None ends one of them."""


class StateFile:
    """Float32 numbers on a disk, zeros at first."""

    def __init__(self, directory: Path, numbers: int) -> None:
        """Take the room for all bytes at once. Raises `ConfigError` where there is none."""
        self._directory = directory
        size = 4 * numbers
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _check_room(directory, size)  # before a part of it is taken from others in vain
            self._file, name = tempfile.mkstemp(dir=directory, prefix="optimizer-state-")
            _at_its_end(self, os.close, self._file)
            Path(name).unlink()  # before the room is taken, which a process that is killed would leave behind
            os.posix_fallocate(self._file, 0, size)
            self.mapped = torch.from_numpy(np.frombuffer(mmap.mmap(self._file, size), np.float32))
            """float32 [numbers], the content, read and written by way of the page cache."""
        except OSError as error:
            raise ConfigError(
                f"optimizer.offload_directory={directory} cannot take the {size / 1e9:.1f} GB of one "
                f"rank's optimizer state ({error}): name a directory on another disk, or none"
            ) from error
        self._queue: _Queue = SimpleQueue()
        for _ in range(THREADS):
            # At the exit Python waits for the threads of a pool: for ever, where a disk hangs.
            Thread(target=_work_off, args=(self._queue,), name="optimizer-state", daemon=True).start()
            _at_its_end(self, self._queue.put, None)

    def read(self, into: Tensor, start: int) -> Transfer:
        """Begin to copy the numbers from `start` on into contiguous memory."""
        return self._transfer("reading", os.preadv, into, start)

    def write(self, numbers: Tensor, start: int) -> Transfer:
        """Begin to replace the numbers from `start` on; these must stay as they are until it has ended."""
        return self._transfer("writing", os.pwritev, numbers, start)

    def _transfer(self, what: str, call: _Call, memory: Tensor, start: int) -> Transfer:
        content, first = memory.numpy().data.cast("B"), 4 * start
        parts = [
            self._begin(call, content[at : at + CHUNK_BYTES], first + at)
            for at in range(0, len(content), CHUNK_BYTES)
        ]
        return Transfer(f"{what} {len(content) / 1e6:.1f} MB of optimizer state in {self._directory}", parts)

    def _begin(self, call: _Call, content: memoryview, start: int) -> Future[None]:
        done: Future[None] = Future()

        def work() -> None:
            try:
                _all_of(call, self._file, content, start)  # `self` keeps the file open until then
            except Exception as error:  # noqa: BLE001 - whoever waits raises it
                done.set_exception(error)
            else:
                done.set_result(None)

        self._queue.put(work)
        return done


def _at_its_end(file: StateFile, call: Callable[..., object], *args: object) -> None:
    """Call `call` when nobody has the file any more; when the process ends, the system does all of this."""
    weakref.finalize(file, call, *args).atexit = False


def _work_off(queue: _Queue) -> None:
    while (work := queue.get()) is not None:
        work()
        del work  # the work keeps the file


def _all_of(call: _Call, file: int, content: memoryview, start: int) -> None:
    while content:
        done = call(file, [content], start)
        if not done:
            raise OSError(errno.EIO, "the file ends too early")
        content, start = content[done:], start + done


def _check_room(directory: Path, size_bytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if size_bytes > free:
        raise OSError(errno.ENOSPC, f"only {free / 1e9:.1f} GB are free")
