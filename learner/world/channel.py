"""Tells how rank 0's calls reach the other ranks, and how it hears that one of them was told to stop."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from bus.errors import WorldError

SILENCE_LIMIT = timedelta(minutes=2)
"""Rank 0 sends something every second: one that is silent for so long hangs."""
ROLL_CALL_S = 10.0
"""Seconds in which ranks that wait for a silent one say that they are here."""


@dataclass(frozen=True)
class RankCall:
    """A method of `Rank` that all ranks call, or None to leave the world."""

    method: str | None
    arguments: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)


class Channel:
    """A gloo group and a thread of its own, so that calls pass while the train thread computes. Every rank
    makes one at the same moment. In a world of one nothing is sent."""

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop = stop
        self._rank, self._alone = dist.get_rank(), dist.get_world_size() == 1
        self._group = dist.new_group(backend="gloo", timeout=SILENCE_LIMIT)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="calls")

    async def send(self, call: RankCall | None = None) -> bool:
        """Pass `call`, or a sign of life, to all other ranks; return whether one of them was told to stop.
        For rank 0. Raises `WorldError` when a rank is gone."""
        if self._alone:
            return False
        _, stopping = await self._in_thread(call)
        return stopping

    async def receive(self) -> RankCall | None:
        """Return what rank 0 sends next. Raises `WorldError` when it is gone, or silent for
        `SILENCE_LIMIT`."""
        call, _ = await self._in_thread(None)
        return call

    async def _in_thread(self, call: RankCall | None) -> tuple[RankCall | None, bool]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._pass, call)

    def _pass(self, call: RankCall | None) -> tuple[RankCall | None, bool]:
        """Pass one round of all ranks: the call from rank 0, the wish to stop from any to all."""
        box, began = [call], time.monotonic()
        try:
            dist.broadcast_object_list(box, 0, group=self._group)
            stopping = torch.tensor(int(self._stop.is_set()))  # all ranks stop after the same call
            dist.all_reduce(stopping, dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            whom = "another rank" if self._rank == 0 else "rank 0"
            if time.monotonic() - began >= SILENCE_LIMIT.total_seconds():  # all that wait give up now
                whom = self._silent() or whom
            raise WorldError(f"rank {self._rank} of the learner lost {whom}: {error}") from error
        return box[0], bool(stopping)

    def _silent(self) -> str:
        """Tell the others, by the store where the world met, that this rank is here. Return the ranks that do
        not say so, on rank 0."""
        store = c10d.PrefixStore("roll call", c10d._get_default_store())
        deadline, found = time.monotonic() + ROLL_CALL_S, list[str]()
        store.set(str(self._rank), "here")
        for rank in range(1, dist.get_world_size()) if self._rank == 0 else ():
            try:
                store.wait([str(rank)], timedelta(seconds=max(0.01, deadline - time.monotonic())))
            except dist.DistError:
                found.append(f"rank {rank}")
        return f"{', '.join(found)}, silent for {SILENCE_LIMIT.total_seconds():g} s" if found else ""
