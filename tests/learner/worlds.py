"""Worlds of gloo processes that stay up while test after test divides them another way."""

import gc
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection
from typing import Any, Self

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stubs do not export it

TIMEOUT_S = 240
"""Bound on what takes seconds: on a machine that others slow down, four ranks have taken above a minute."""
IMPORTED_BEFORE_FORKING = [
    "learner.backends.megatron.trainer",
    "learner.checkpoint.commit",
    "tests.learner.tiny",
]


class Worlds:
    """Worlds by their number of ranks, started when first needed; a context manager that ends them."""

    def __init__(self) -> None:
        self._up: dict[int, _World] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for world in self._up.values():
            world.end()

    def run(self, ranks: int, work: Callable[..., Any], *args: object) -> list[Any]:
        """Call `work(*args)` on every rank of a world of so many, and return what each returned.

        A world in which something failed is not used again.
        """
        world = self._up.pop(ranks, None) or _World(ranks)
        try:
            answers = world.run(work, *args)
        except BaseException:
            world.end()
            raise
        self._up[ranks] = world
        return answers


class _World:
    def __init__(self, ranks: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED_BEFORE_FORKING)
        # Kept by this process, a port cannot be taken between its choice and its use.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes, self._processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            args = rank, ranks, self._store.port, theirs
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(60)
            if process.is_alive():
                process.kill()
                process.join(60)

    def run(self, work: Callable[..., Any], *args: object) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((work, args))
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + TIMEOUT_S
        while len(answers) < len(self._pipes):
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            ready = connection.wait(waiting, deadline - time.monotonic())
            assert ready, f"only the ranks {sorted(answers)} have answered in {TIMEOUT_S} s"
            for pipe in ready:
                rank = self._pipes.index(pipe)
                fine, answers[rank] = pipe.recv()
                assert fine, f"rank {rank}:\n{answers[rank]}"
        return [answers[rank] for rank in range(len(self._pipes))]


def _serve(rank: int, ranks: int, port: int, pipe: connection.Connection) -> None:
    from learner.backends.factory import init_world

    gc.freeze()  # what was imported is no garbage, and need not be looked at whenever the world is divided
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # torchrun's name for a store that no rank serves
    }
    try:
        init_world()
        while True:
            work, args = pipe.recv()
            pipe.send((True, work(*args)))
    except EOFError:
        return  # the test is over
    except Exception:  # noqa: BLE001  # whatever it is, the test shows it
        with suppress(BrokenPipeError):  # unless another rank was first
            pipe.send((False, traceback.format_exc()))
