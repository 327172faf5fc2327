"""A process that is rank 0 of one engine's group, and broadcasts weights to it.

A collective that hangs can only be ended with its process, and NCCL's watchdog ends the process it is in: so
this is not the learner's. Lines of JSON come by standard input and go by standard output; it ends with the
first failure, and with its standard input. The group is made as SGLang makes its side of it."""

import json
import mmap
import os
import queue
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d as c10d

from bus.errors import TrainingError
from learner.host_memory.copies import lock_pages

Line = dict[str, Any]
_output = 1
LEFT_BYTES = 1 << 30
"""GPU memory that weights which are not sent yet leave free."""
KEPT = 2
"""Versions whose memory stays mapped: the one that is sent and, where engines are slow, the one before."""


def main() -> NoReturn:
    """Say the port where the ranks meet, `prepared` when there is something to send, then `joined`.

    From then on do what is told: `prepare` what `SharedCopy.where` describes, or `send` it, and say when that
    is done. The first argument is a JSON object: `group`, `world_size`, `backend`, `device`, `device_bytes`
    of it for weights that are not sent yet, `timeout_s`, which bounds every wait for the other ranks, and
    `connect_s`, for which ranks of a learner that was killed are met."""
    global _output
    _output = _own_output()
    order = json.loads(sys.argv[1])
    asked: queue.SimpleQueue[Line] = queue.SimpleQueue()
    joined = threading.Event()
    threading.Thread(target=_listen, args=(asked, joined, order["connect_s"]), daemon=True).start()
    try:
        timeout = timedelta(seconds=order["timeout_s"])
        store = TCPStore(
            "127.0.0.1", 0, order["world_size"], is_master=True, timeout=timeout, wait_for_workers=False
        )
        _say(port=store.port)
        if order["device"] != "cpu":
            torch.cuda.set_device(order["device"])
        source = Source(order["device"], order["device_bytes"])
        _obey(asked.get(), source, None)  # what to send first, before anybody waits for us
        group = _join(store, order, timeout)
        joined.set()
        _say(joined=True)
        while True:
            _obey(asked.get(), source, group)
    # Whatever goes wrong ends this process. The learner is sent the error, which it raises or logs, and the
    # traceback goes to standard error, which is the learner's log.
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        _say(error=f"{type(error).__name__}: {error}")
    os._exit(1)  # no clean-up: it would wait for the others


def _listen(asked: "queue.SimpleQueue[Line]", joined: threading.Event, connect_s: float) -> None:
    for line in sys.stdin:
        asked.put(json.loads(line))
    # The learner was killed: it kills us where it wants us gone. Engines that it has just offered this group
    # hear of the group's end once they are in it. Else they would look for us until their own time limit.
    joined.wait(connect_s)
    os._exit(0)


def _own_output() -> int:
    """Standard output for us alone: libraries write to the descriptor they know (NCCL_DEBUG=INFO does)."""
    own = os.dup(1)
    os.dup2(2, 1)
    return own


def _say(**line: object) -> None:
    os.write(_output, json.dumps(line).encode() + b"\n")


def _join(store: c10d.Store, order: Line, timeout: timedelta) -> dist.ProcessGroup:
    """Join the group as SGLang's `init_custom_process_group` does: both sides use the same keys."""
    name, size = order["group"], order["world_size"]
    group: dist.ProcessGroup
    group, _ = c10d._new_process_group_helper(
        size,
        0,
        [],
        c10d.Backend(order["backend"]),
        c10d.PrefixStore(name, store),
        group_name=name,
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group


def _obey(request: Line, source: "Source", group: dist.ProcessGroup | None) -> None:
    if "prepare" in request:
        _say(prepared=True, slower=source.prepare(request["prepare"]))
    else:
        source.send(request["send"], group)
        _say(sent=True)


class Source:
    """The learner's memory, mapped here, and room on the device for what is on its way from there.

    The first buckets are brought to the device when a version is prepared, as far as they may take memory
    there; the others, while those before them are broadcast."""

    def __init__(self, device: str, device_bytes: int = 0) -> None:
        self._device = device
        self._device_bytes = device_bytes
        self._mapped: dict[int, torch.Tensor] = {}
        """Bytes by the number of the memory; the one used last is the last."""
        self._staging = torch.empty(0, dtype=torch.uint8, device=device)
        self._ahead = torch.empty(0, dtype=torch.uint8, device=device)
        """The first buckets of version `_ahead_version`."""
        self._ahead_version = -1
        self._locks = device != "cpu"

    def prepare(self, asked: Line) -> str:
        """Map the memory, lock its pages, make room and bring the first buckets there, unless that is done.
        Return why sending is slower than it could be, once."""
        memory, slower = self._mapped.pop(asked["memory"], None), ""
        if memory is None:
            memory, slower = self._map(asked["file"])
        self._mapped[asked["memory"]] = memory
        while len(self._mapped) > KEPT:
            del self._mapped[next(iter(self._mapped))]
        if self._device == "cpu" or self._ahead_version == asked["policy_version"]:
            return slower
        full = self._allocate(asked)
        self._ahead.copy_(memory[: len(self._ahead)])
        self._ahead_version = asked["policy_version"]
        return "; ".join(filter(None, (slower, full)))

    def send(self, asked: Line, group: dist.ProcessGroup | None) -> None:
        """Broadcast the tensors of all buckets, in order; return when the other ranks have them."""
        self.prepare(asked)
        for place, bucket in zip(self._placed(asked), asked["buckets"], strict=True):
            tensors = [_tensor(place, bucket["span"][0], *entry) for entry in bucket["tensors"]]
            works = [dist.broadcast(tensor, 0, group=group, async_op=True) for tensor in tensors]
            for work in works:
                work.wait()
        if self._device != "cpu":
            sent = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            sent.record()
            sent.synchronize()

    def _allocate(self, asked: Line) -> str:
        """Allocate memory for as many buckets as may lie on the device, and for what is on its way there.
        Where the device has not so much, none lie there from now on: return that it is so."""
        try:
            self._fit(asked, self._device_bytes)
        except torch.OutOfMemoryError as error:
            if not self._device_bytes:
                raise
            self._fit(asked, 0)
            allowed, self._device_bytes = self._device_bytes, 0
            return f"no room for learner.publication.broadcast_device_bytes={allowed} on the GPU: {error}"
        return ""

    def _fit(self, asked: Line, device_bytes: int) -> None:
        spans = _spans(asked)
        ahead = max((end for _, end in spans if end <= device_bytes), default=0)
        sizes = [end - begin for begin, end in spans if end > ahead]
        staging = max([min(asked["staging_bytes"], sum(sizes)), *sizes])
        if len(self._ahead) == ahead and len(self._staging) >= staging:
            return
        self._ahead = self._staging = torch.empty(0, dtype=torch.uint8, device=self._device)
        torch.cuda.empty_cache()  # else old memory would not serve new buffers
        self._staging = torch.empty(staging, dtype=torch.uint8, device=self._device)
        self._ahead = torch.empty(ahead, dtype=torch.uint8, device=self._device)
        if ahead and torch.cuda.mem_get_info(self._device)[0] < LEFT_BYTES:
            raise torch.OutOfMemoryError("it would have less than 1 GiB left, for NCCL and the learner")

    def _map(self, path: str) -> tuple[torch.Tensor, str]:
        with Path(path).open("r+b") as file:  # shared: a private mapping, once locked, keeps what it has
            shared = mmap.mmap(file.fileno(), 0)
        memory, unlocked = np.frombuffer(shared, np.uint8), ""
        if self._locks:
            try:
                lock_pages(memory)
            except TrainingError as error:
                self._locks, unlocked = False, str(error)
                with suppress(RuntimeError):  # CUDA tells of it again, whoever asks next
                    torch.zeros(1, device=self._device)
        return torch.from_numpy(memory), unlocked

    def _placed(self, asked: Line) -> Iterator[torch.Tensor]:
        memory, spans = self._mapped[asked["memory"]], _spans(asked)
        if self._device == "cpu":
            return (memory[begin:end] for begin, end in spans)
        ahead = [(begin, end) for begin, end in spans if end <= len(self._ahead)]
        return chain(
            (self._ahead[begin:end] for begin, end in ahead), self._staged(memory, spans[len(ahead) :])
        )

    def _staged(self, memory: torch.Tensor, spans: Sequence[tuple[int, int]]) -> Iterator[torch.Tensor]:
        """Yield the bytes of each bucket on the device, where one is copied while the one before is
        broadcast.

        They lie at the start of the buffer and at its end in turn. What was yielded is to be used, on the
        current stream, before the next is asked for."""
        here = torch.cuda.current_stream()
        copying = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        before_last: torch.cuda.Event | None = None
        last: torch.cuda.Event | None = None
        size_before = 0
        for number, (begin, end) in enumerate(spans):
            size = end - begin
            in_the_way = last if size_before + size > len(self._staging) else before_last
            if in_the_way is not None:
                in_the_way.synchronize()
            start = 0 if number % 2 == 0 else len(self._staging) - size
            place = self._staging[start : start + size]
            with torch.cuda.stream(copying):
                place.copy_(memory[begin:end], non_blocking=True)
            here.wait_stream(copying)
            yield place
            before_last, size_before = last, size
            last = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            last.record(here)


def _spans(asked: Line) -> list[tuple[int, int]]:
    return [(begin, end) for begin, end in (bucket["span"] for bucket in asked["buckets"])]


def _tensor(place: torch.Tensor, begin: int, dtype: str, shape: list[int], offset: int) -> torch.Tensor:
    kind = getattr(torch, dtype)
    start = offset - begin
    return place[start : start + prod(shape) * kind.itemsize].view(kind).reshape(shape)


if __name__ == "__main__":
    main()
