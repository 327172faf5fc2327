"""How rank 0's commands reach the other ranks, and how it hears that one of them was told to stop."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist

from bus.errors import WorldError

SILENCE_LIMIT = timedelta(minutes=2)
"""Rank 0 sends something every second: one that is silent for so long hangs."""


class Channel:
    """A gloo group and a thread of its own, so that commands pass while the train thread computes.

    Every rank makes one at the same moment. In a world of one nothing is sent.
    """

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop = stop
        self._rank, self._alone = dist.get_rank(), dist.get_world_size() == 1
        self._group = dist.new_group(backend="gloo", timeout=SILENCE_LIMIT)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="commands")

    async def send(self, data: bytes) -> bool:
        """Pass `data` to all other ranks; return whether one of them has been told to stop. For rank 0.

        Raises `WorldError` when a rank is gone.
        """
        if self._alone:
            return False
        _, stopping = await self._in_thread(data)
        return stopping

    async def receive(self) -> bytes:
        """What rank 0 sends next. Raises `WorldError` when it is gone, or silent for `SILENCE_LIMIT`."""
        data, _ = await self._in_thread(b"")
        return data

    async def _in_thread(self, data: bytes) -> tuple[bytes, bool]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._pass, data)

    def _pass(self, data: bytes) -> tuple[bytes, bool]:
        """One round of all ranks: the data from rank 0, the wish to stop from any to all."""
        try:
            size = torch.tensor(len(data))
            dist.broadcast(size, 0, group=self._group)  # the others must know how much room the data needs
            content = torch.zeros(int(size), dtype=torch.uint8)
            if data:
                content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            if size:
                dist.broadcast(content, 0, group=self._group)
            stopping = torch.tensor(int(self._stop.is_set()))  # all ranks stop after the same command
            dist.all_reduce(stopping, dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            whom = "another rank" if self._rank == 0 else "rank 0"
            raise WorldError(f"rank {self._rank} of the learner lost {whom}: {error}") from error
        return content.numpy().tobytes(), bool(stopping)
