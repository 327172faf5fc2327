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
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d as c10d

Line = dict[str, Any]


def main() -> NoReturn:
    """Say the port where the ranks meet, then `joined`, then `sent` after each version that is asked for.

    The first argument is a JSON object: `group`, `world_size`, `backend`, `device`, and `timeout_s`, which
    bounds every wait for the other ranks."""
    order = json.loads(sys.argv[1])
    asked: queue.SimpleQueue[Line] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(asked,), daemon=True).start()
    try:
        timeout = timedelta(seconds=order["timeout_s"])
        store = TCPStore(
            "127.0.0.1", 0, order["world_size"], is_master=True, timeout=timeout, wait_for_workers=False
        )
        _say(port=store.port)
        if order["device"] != "cpu":
            torch.cuda.set_device(order["device"])
        group = _join(store, order, timeout)
        _say(joined=True)
        while True:
            _send(asked.get(), group, order["device"])
            _say(sent=True)
    except Exception as error:  # noqa: BLE001  # whatever it is, the learner is told and this process ends
        _say(error=f"{type(error).__name__}: {error}")
    os._exit(1)  # no clean-up: it would wait for the others


def _listen(asked: "queue.SimpleQueue[Line]") -> None:
    for line in sys.stdin:
        asked.put(json.loads(line))
    os._exit(0)  # the learner is gone, or wants us gone


def _say(**line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _join(store: c10d.Store, order: Line, timeout: timedelta) -> dist.ProcessGroup:
    """As SGLang's `init_custom_process_group`, so that both sides look under the same keys of the store."""
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


def _send(asked: Line, group: dist.ProcessGroup, device: str) -> None:
    """Broadcast the tensors of a file: `buckets` of `[dtype, shape, offset]`."""
    with Path(asked["file"]).open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants memory it may write to
    for bucket in asked["buckets"]:
        tensors = [_tensor(memory, *entry).to(device) for entry in bucket]
        works = [dist.broadcast(tensor, 0, group=group, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()
        if device != "cpu":
            torch.cuda.synchronize()


def _tensor(memory: mmap.mmap, dtype: str, shape: list[int], offset: int) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if not prod(shape):
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(memory, dtype=kind, count=prod(shape), offset=offset).reshape(shape)


if __name__ == "__main__":
    main()
