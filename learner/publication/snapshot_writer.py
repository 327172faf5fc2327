"""Writes snapshots beside training and beside later publications, whose weights take the same memory."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from bus.errors import BusError
from bus.waiting import cancelled
from storage.disk.atomic_files import Content, Data
from storage.weights.tensors import Weights, snapshot_content

PIECE_BYTES = 8 << 20
"""Bytes that are read, and that a bound on the bandwidth delays, at a time."""


class HeldContent:
    """Content of a snapshot, to be read once, in another thread and not faster than its bound.

    It is read where the tensors lie until their memory is wanted back: then `release` copies what is left."""

    def __init__(self, weights: Weights, bytes_per_s: int | None, *, ranks: int = 1) -> None:
        """Hold what this process has of a version, which so many `ranks` write at `bytes_per_s` together."""
        self._left = deque(_pieces(weights))
        self._own = False
        """Whether what is left lies in memory of its own."""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._seconds_a_byte = ranks / bytes_per_s if bytes_per_s else 0.0

    def __iter__(self) -> Iterator[Data]:
        """Yield the pieces. Raises `BusError` after `end`."""
        due = time.monotonic()
        while (piece := self._next()) is not None:
            due = max(due, time.monotonic() - 1) + len(piece) * self._seconds_a_byte
            if self._ended.wait(max(0.0, due - time.monotonic())):
                raise BusError("a snapshot was not written to its end, since this learner ends")
            yield piece

    def _next(self) -> Data | None:
        with self._lock:
            if not self._left:
                return None
            piece = self._left.popleft()
            return piece if self._own else _copy(piece)

    def release(self, threads: int) -> None:
        """Return when the memory of the tensors is not needed any more, however slow the reader is."""
        with self._lock, ThreadPoolExecutor(threads, "copy") as copying:
            if not self._own:
                self._left = deque(copying.map(_copy, self._left))
                self._own = True

    def end(self) -> None:
        """Have the reader stop, and free the memory."""
        self._ended.set()
        with self._lock:
            self._left.clear()


class SnapshotWriter:
    """Writes one snapshot at a time; those that began meanwhile wait, and nobody waits for them."""

    def __init__(self, bytes_per_s: int | None, threads: int) -> None:
        """Read snapshots at `bytes_per_s` at most; copy them by `threads` where they are slow."""
        self._bytes_per_s, self._threads = bytes_per_s, threads
        self._begun: dict[asyncio.Task[None], HeldContent] = {}
        self._one = asyncio.Lock()
        self._seconds = 0.0

    @property
    def busy(self) -> bool:
        """Tell whether a snapshot is being written or is about to be."""
        return not all(task.done() for task in self._begun)

    async def begin(
        self, weights: Weights, write: Callable[[Content], Awaitable[bool]], *, ranks: int = 1
    ) -> None:
        """Have `write` store the content of the weights, and tell whether it is announced. Their tensors stay
        as they are until `release`. With `ranks` the others of so many write what they have."""
        held = await asyncio.to_thread(HeldContent, weights, self._bytes_per_s, ranks=ranks)
        task = asyncio.create_task(self._write(held, write), name=f"snapshot {weights.policy_version}")
        self._begun[task] = held

    async def release(self) -> None:
        """Return when the tensors of all snapshots may change. Raises what ended one of them."""
        for task, held in list(self._begun.items()):
            if not task.done():
                await asyncio.to_thread(held.release, self._threads)
                continue
            if self._begun.pop(task, None) is not None:  # another waiter may have raised the error meanwhile
                task.result()

    def figures(self) -> dict[str, float]:
        """Return the seconds that snapshots took which were finished since this was called last, if any."""
        seconds, self._seconds = self._seconds, 0.0
        return {"time/snapshot_s": seconds} if seconds else {}

    async def finished(self) -> None:
        """Wait until all snapshots that have begun are there. Raises what ended one of them."""
        while self._begun:
            await asyncio.wait(self._begun)
            await self.release()

    async def close(self) -> None:
        """Give up what is not written yet; what was whole before stays so."""
        for held in self._begun.values():
            held.end()
        await cancelled(*self._begun)
        self._begun.clear()

    async def _write(self, held: HeldContent, write: Callable[[Content], Awaitable[bool]]) -> None:
        try:
            async with self._one:
                began = time.perf_counter()
                if await write(held):
                    self._seconds += time.perf_counter() - began
        finally:
            held.end()


def _pieces(weights: Weights) -> Iterator[Data]:
    for part in snapshot_content(weights):
        view = memoryview(part).cast("B")
        yield from (view[begin : begin + PIECE_BYTES] for begin in range(0, len(view), PIECE_BYTES))


def _copy(piece: Data) -> Data:
    """Copy without the interpreter's lock, which `bytes` would hold meanwhile."""
    return np.frombuffer(piece, np.uint8).copy().data
