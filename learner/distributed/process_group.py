"""The learner's processes as torch's default process group, whatever backend divides them."""

import os
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from bus.process.host_limits import cpu_threads

T = TypeVar("T")


def device() -> torch.device:
    """Return where this process computes: its own GPU where CUDA exists, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def world_rank() -> int:
    """Return this process's number, from 0; known before the process group is there."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return how many processes there are; known before the process group is there."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 1


def init_process_group(timeout_s: float) -> None:
    """Join the world that torchrun describes in the environment, or be a world of one.

    `timeout_s` bounds each collective of the default group. Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR
    and MASTER_PORT. NCCL where CUDA exists, else gloo."""
    backend, device_id, timeout = "gloo", None, timedelta(seconds=timeout_s)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend, device_id = "nccl", device()
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]  # torch exports it, its stubs do not
        dist.init_process_group(
            backend, store=store, rank=0, world_size=1, timeout=timeout, device_id=device_id
        )


def use_threads(chosen: int | None, model_bytes: int) -> None:
    """Compute with as many threads as settings say, or as a model of this size is worth on this rank."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    on_device = 1 if torch.cuda.is_available() else None
    torch.set_num_threads(cpu_threads(chosen or on_device, model_bytes, processes=ranks))


def gathered(value: T) -> list[T]:
    """Return the `value` of every rank, in the order of ranks. Every rank calls this."""
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Peers:
    """The ranks of the world that were given the same number as this one, of which the first acts for all."""

    def __init__(self, number: int, timeout_s: float) -> None:
        """Find the ranks. Every rank calls this; `timeout_s` bounds each collective of theirs."""
        numbers = gathered(number)
        members = [[rank for rank, n in enumerate(numbers) if n == each] for each in sorted(set(numbers))]
        self._first = numbers.index(number)
        self._alone = numbers.count(number) == 1
        self._group = None
        if len(members) < len(numbers):  # every rank has to call this, or none
            self._group, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
                members, timeout=timedelta(seconds=timeout_s), backend="gloo"
            )

    @property
    def is_first(self) -> bool:
        """Tell whether this rank is the one that acts."""
        return dist.get_rank() == self._first

    def from_first(self, value: T) -> T:
        """Return the `value` of the first of them on each. All of them call this."""
        if self._alone:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=self._first, group=self._group, device=torch.device("cpu"))
        return box[0]


def most_over_ranks(count: int) -> int:
    """Return the largest `count` of any rank. Every rank calls this."""
    counts = torch.tensor(count, device=device())
    dist.all_reduce(counts, op=dist.ReduceOp.MAX)
    return int(counts)


def gathered_columns(own: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Return the columns [rows, n] of every rank of `group`, of which each has its own number."""
    columns = torch.tensor([own.shape[1]], device=own.device)
    counts = [torch.empty_like(columns) for _ in range(group.size())]
    dist.all_gather(counts, columns, group=group)
    most = max(int(count) for count in counts)
    padded = torch.nn.functional.pad(own, (0, most - own.shape[1]))
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    return [part[:, : int(count)] for part, count in zip(parts, counts, strict=True)]
