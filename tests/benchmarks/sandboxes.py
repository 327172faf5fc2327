"""Tells how many sandboxes of episodes a host starts a second, and how long a command takes in one.

`launch bench sandboxes` prints the figures for namespaces. Beside them stand those of a bare process of this
host, which nothing can undercut: a sandbox is two of them at least.
"""

import asyncio
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import psutil

from actors.episode_sandboxes.base import Command, EpisodeSandbox
from actors.episode_sandboxes.build import build_backend
from actors.episode_sandboxes.pool import SandboxPool
from actors.settings.sandbox_tools import SandboxToolConfig
from bus.errors import ConfigError
from bus.waiting import cancelled

WORDS = ("/bin/echo", "done")
COMMANDS = 20
"""Commands that each sandbox carries out."""
Report = dict[str, dict[str, float]]


def bench_sandboxes(sandboxes: int, at_once: int) -> Report:
    """Return starts and commands a second, with their times in ms, of sandboxes and of bare processes."""
    if not 1 <= at_once <= sandboxes:
        raise ConfigError(f"--sandboxes {sandboxes} of --at-once {at_once}: give at least as many")
    return asyncio.run(_bench(sandboxes, at_once))


async def _bench(sandboxes: int, at_once: int) -> Report:
    config = SandboxToolConfig()
    pool = SandboxPool(build_backend(config.backend), config, at_once=at_once)
    try:
        async with pool.sandbox():  # the first one starts what starts the others
            pass
        report: Report = {
            "processes": await _load(_bare, sandboxes, at_once),
            "starts_and_ends": await _load(lambda: _started(pool), sandboxes, at_once),
        }
        opened = asyncio.Queue[EpisodeSandbox]()
        holding = [asyncio.create_task(_hold(pool, opened)) for _ in range(at_once)]
        held = [await opened.get() for _ in holding]
        turns = iter(held * (COMMANDS * sandboxes // at_once))
        report["commands"] = await _load(lambda: _ran(next(turns)), len(held) * COMMANDS, at_once)
        report["commands_alone"] = await _load(lambda: _ran(held[0]), COMMANDS * 5, 1)
        await cancelled(*holding)
    finally:
        await pool.close()
    return report


async def _hold(pool: SandboxPool, opened: "asyncio.Queue[EpisodeSandbox]") -> None:
    async with pool.sandbox() as sandbox:
        opened.put_nowait(sandbox)
        await asyncio.Event().wait()


async def _started(pool: SandboxPool) -> None:
    async with pool.sandbox():
        pass


async def _ran(sandbox: EpisodeSandbox) -> None:
    ran = await sandbox.run(Command(words=WORDS, timeout_s=60.0))
    assert ran.stdout == b"done\n", ran


async def _bare() -> None:
    process = await asyncio.create_subprocess_exec(*WORDS, stdin=DEVNULL, stdout=PIPE)
    await process.communicate()


async def _load(work: Callable[[], Awaitable[None]], count: int, at_once: int) -> dict[str, float]:
    """Do something so often, so many at a time."""
    places, spent = asyncio.Semaphore(at_once), list[float]()

    async def once() -> None:
        async with places:
            began = time.perf_counter()
            await work()
            spent.append(time.perf_counter() - began)

    psutil.cpu_percent()  # that of the next call is since this one
    began = time.perf_counter()
    await asyncio.gather(*(once() for _ in range(count)))
    took = time.perf_counter() - began
    return {
        "a_second": round(count / took, 1),
        **_spread(spent),
        "host_busy": round(psutil.cpu_percent() / 100, 2),
    }


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(np.array(seconds) * 1e3, [50, 99])
    return {"p50_ms": round(float(p50), 2), "p99_ms": round(float(p99), 2)}
