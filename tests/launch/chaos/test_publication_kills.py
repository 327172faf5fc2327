"""Processes are killed at random moments of publications by ranks.

The next version arrives, and no engine serves tensors of two versions."""

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from bus.connection import Bus
from bus.messages import PolicyManifest
from bus.server.nats_server import NatsServer
from tests.bus.security.secured import secured_bus
from tests.launch.chaos.publication_processes import (
    RANKS,
    Processes,
    Run,
    actor_process,
    kill,
    rank_process,
    storage_process,
)

pytestmark = [pytest.mark.nats, pytest.mark.slow]
ACTORS = ("actor-1", "actor-2")
VICTIMS = ("rank 0", "rank 1", "storage", *ACTORS)
ARRIVES_S = 180.0
"""Longest time until the next version is served by every actor."""
ENDS_S = 120.0
"""Longest time until a rank ends that has lost another."""
NO_LATER_VERSION = 1 << 62
LONGEST_S = 1.0
"""A kill comes within so many seconds of the version that arrived last."""


@asynccontextmanager
async def run_on_a_bus(directory: Path, *, secured: bool) -> AsyncIterator[Run]:
    for name in ("model", "storage"):
        (directory / name).mkdir()
    (directory / "model" / "config.json").write_text("{}")
    if secured:
        async with secured_bus(directory, "mine") as (secure, server):
            yield Run("mine", server.url, directory, secure.path / "mine")
    else:
        async with NatsServer(directory / "nats") as server:
            yield Run("mine", server.url, directory)


class Victims:
    """The processes of a run, which are started again when they are killed."""

    def __init__(self, run: Run, processes: Processes, bus: Bus) -> None:
        self._run, self._processes, self._bus = run, processes, bus
        self._lives = count()
        self._ranks, self._store = [], None
        self._alone = {}
        """Storage and the actors, each with the pipe by which it tells something."""
        self.passed_on_bytes: dict[str, int] = {}
        """Bytes that others had from each process of an actor."""

    async def start(self) -> None:
        self._start_storage()
        assert await self._told("storage") == "up"
        self._start_learner()
        for name in ACTORS:
            self._start_actor(name)
        await self.all_serve_later_than(-1, -1)

    def _start_learner(self) -> None:
        self.life = next(self._lives)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ranks = [
            self._processes.start(rank_process, self._run, n, self._store.port, f"life-{self.life}")
            for n in range(RANKS)
        ]

    def _start_storage(self) -> None:
        self._alone["storage"] = self._processes.started_with_pipe(storage_process, self._run)

    def _start_actor(self, name: str) -> None:
        self._alone[name] = self._processes.started_with_pipe(actor_process, self._run, name)

    async def kill(self, name: str) -> None:
        """Kill a process, and start what is started again in its place."""
        if name.startswith("rank"):
            await asyncio.to_thread(kill, self._ranks[int(name[-1])])
            for rank in self._ranks:
                await asyncio.to_thread(rank.join, ENDS_S)
                if rank.is_alive():
                    os.kill(rank.pid, signal.SIGUSR1)  # it writes where it is
                    await asyncio.sleep(2)
                    said = (self._run.directory / f"rank-{self._ranks.index(rank)}.log").read_text()
                    pytest.fail(f"a rank lives {ENDS_S:g} s after {name} was killed: {said[-6000:]}")
            self._start_learner()
            return
        process, pipe = self._alone[name]
        await asyncio.to_thread(kill, process)
        pipe.close()
        if name == "storage":
            self._start_storage()
        else:
            self._start_actor(name)

    async def announced(self) -> tuple[int, int]:
        """Return the life of the learner that announced last, and the version."""
        [found, _] = await self._bus.get("policy", PolicyManifest)
        return int(found.incarnation.removeprefix("life-")), found.policy_version

    async def all_serve_later_than(self, life: int, version: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for name in ACTORS:
                tasks.create_task(self._serves_later(name, life, version))

    async def _serves_later(self, name: str, life: int, version: int) -> None:
        while True:
            incarnation, served, wrong, passed_on = await self._told(name)
            assert not wrong, f"{name} serves {wrong} of other versions than {served} of {incarnation}"
            self.passed_on_bytes[f"{name} {self._alone[name][0].pid}"] = passed_on
            if (int(incarnation.removeprefix("life-")), served) > (life, version):
                return

    async def _told(self, name: str) -> object:
        process, pipe = self._alone[name]
        deadline = time.monotonic() + ARRIVES_S
        while not await asyncio.to_thread(pipe.poll, 0.5):
            assert process.is_alive(), f"{name} ended: see {self._run.directory / name}.log"
            assert all(rank.is_alive() for rank in self._ranks), "a rank ended by itself"
            assert time.monotonic() < deadline, f"{name} told nothing for {ARRIVES_S:g} s"
        return pipe.recv()


async def kill_at_random(
    directory: Path, names: Sequence[str], *, secured: bool, seed: int
) -> dict[str, int]:
    """Kill these processes, each once the next version has arrived; return the bytes that others had from
    each process of an actor."""
    draw = random.Random(seed)
    async with AsyncExitStack() as stack:
        processes = stack.enter_context(Processes())
        run = await stack.enter_async_context(run_on_a_bus(directory, secured=secured))
        bus = await stack.enter_async_context(run.connect("learner", "test"))
        victims = Victims(run, processes, bus)
        await victims.start()
        for name in draw.sample(names, len(names)):
            await asyncio.sleep(draw.uniform(0, LONGEST_S))
            life, version = await victims.announced()
            await victims.kill(name)
            later = (life, NO_LATER_VERSION) if name.startswith("rank") else (life, version)
            await victims.all_serve_later_than(*later)
    return victims.passed_on_bytes


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("secured", "names"), [(False, ("rank 0", "storage", "actor-1")), (True, ("rank 1", "actor-2"))]
)
async def test_the_next_version_arrives_whole_whichever_process_was_killed(tmp_path, secured, names):
    await kill_at_random(tmp_path, names, secured=secured, seed=0)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("secured", [False, True], ids=["plain", "secured"])
async def test_the_next_version_arrives_whole_after_each_of_a_hundred_kills(tmp_path, secured):
    names = VICTIMS * (100 // len(VICTIMS))
    passed_on = await kill_at_random(tmp_path, names, secured=secured, seed=7 + secured)
    assert sum(passed_on.values()) > 0, "no actor that was killed served another"
