"""Tells how long a learner takes to fetch a step's trajectories, by mapping and over the bus, and what that
costs its event loop.

`python -m benchmarks.replay_reads` prints it as JSON. The shards run in a process of their
own, as they do in a run, with a nats-server beside them. Every step reads groups that were not read before.
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import uvloop

from bus.codec import Json
from bus.config import BusConfig
from bus.connection import Bus, answers
from bus.errors import BusError
from bus.messages import group_name
from bus.process.child_process import die_with_parent, module_command
from bus.requests import GroupRef, Located, LocateRequest
from bus.server.nats_server import NatsServer
from bus.topology import ensure, shard_of
from bus.trajectory import Trajectory, Turn
from storage.client.reader import ReplayReader
from storage.shard.server import Shard
from storage.store.replay import ReplayStore

SHARDS = 2
SAMPLES = 8
GROUPS = 32
"""Groups of a step, which make 256 trajectories."""
GROUPS_A_SEGMENT = 4
STEPS = 20
LENGTHS = {"short": 64, "long": 1900}
"""Tokens of a trajectory."""
STARTING_S = 30.0
TICK_S = 0.001


def bench_fetch(directory: Path) -> dict[str, Json]:
    """Milliseconds of a step by each way and for each length; works below `directory`."""
    return uvloop.run(_fetch(directory))


async def _fetch(directory: Path) -> dict[str, Json]:
    figures: dict[str, Json] = {}
    async with NatsServer(directory / "bus") as server:
        for name, tokens in LENGTHS.items():
            run = f"bench-{name}"
            async with Bus.connect(BusConfig(url=server.url), run, name="bench") as bus:
                await ensure(bus.js, bus.topology, SHARDS)
                arguments = server.url, run, str(directory / name), str(tokens)
                shards = await asyncio.create_subprocess_exec(
                    *module_command("benchmarks.replay_reads", *arguments), preexec_fn=die_with_parent()
                )
                try:
                    await _answering(bus)
                    for way, read in (("mapped", "auto"), ("bus", "bus"), ("bus_in_loop", "bus")):
                        found = await _steps(bus, way, read)  # type: ignore[arg-type]
                        figures |= {f"{name}_{way}_{figure}": value for figure, value in found.items()}
                finally:
                    shards.kill()
                    await shards.wait()
    return figures


async def _answering(bus: Bus) -> None:
    """Once every shard answers."""
    request = LocateRequest(lease_ids=(), host="")
    async with asyncio.timeout(STARTING_S):
        for shard in range(SHARDS):
            while True:
                with suppress(BusError):
                    subject = bus.subject("rpc", "locate", shard)
                    await bus.request(subject, request, Located, timeout_s=STARTING_S)
                    break
                await asyncio.sleep(0.05)


async def _steps(bus: Bus, way: str, read: Literal["auto", "bus"]) -> dict[str, Json]:
    """Medians over the steps; `bus_in_loop` decodes in the event loop, for comparison."""
    before = answers.THREAD_BYTES
    if way == "bus_in_loop":
        answers.THREAD_BYTES = sys.maxsize
    try:
        with closing(ReplayReader(bus, "bench", read=read)) as reader:
            measured = [await _measured(partial(reader.fetch, _refs(n))) for n in range(STEPS)]
            wanted = "mapped" if way == "mapped" else "bus"
            if reader.read[wanted] != STEPS * GROUPS * SAMPLES:
                raise RuntimeError(f"{way}: read {dict(reader.read)}")
    finally:
        answers.THREAD_BYTES = before
    medians = [1e3 * statistics.median(column) for column in zip(*measured[1:], strict=True)]
    return dict(zip(("step_ms", "cpu_ms", "loop_cpu_ms", "loop_longest_ms"), medians, strict=True))


async def _measured(fetch: Callable[[], Awaitable[list[list[Trajectory]]]]) -> tuple[float, ...]:
    """Return the seconds of a fetch, of its CPU in all threads and in the loop's, and of the loop's longest
    absence."""
    absences = [0.0]

    async def tick() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(TICK_S)
            absences.append(time.perf_counter() - began - TICK_S)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    clocks = (time.perf_counter, time.process_time, time.thread_time)
    began = [clock() for clock in clocks]
    await fetch()
    seconds = [clock() - start for clock, start in zip(clocks, began, strict=True)]
    ticking.cancel()
    return (*seconds, max(absences))


def _refs(step: int) -> list[GroupRef]:
    leases = range(step * GROUPS, (step + 1) * GROUPS)
    return [GroupRef(lease_id=lease, shard=shard_of(lease, SHARDS)) for lease in leases]


# --- the process of the shards ---


def _group(lease_id: int, tokens: int) -> list[Trajectory]:
    rng = np.random.default_rng(lease_id)
    return [
        Trajectory(
            trajectory_id=f"{group_name(lease_id)}.{sample}",
            group_id=group_name(lease_id),
            lease_id=lease_id,
            sample=sample,
            group_size=SAMPLES,
            rollout=sample,
            turns=(Turn(0, tokens, "stop"),),
            end="completed",
            token_ids=rng.integers(0, 150_000, tokens, dtype=np.int32),
            loss_mask=np.ones(tokens, np.bool_),
            behaviour_logprobs=-rng.random(tokens, dtype=np.float32),
            policy_versions=np.ones(tokens, np.int32),
            reward=1.0,
            metadata={"turns": 1},
        )
        for sample in range(SAMPLES)
    ]


async def _serve_shards(url: str, run: str, directory: Path, tokens: int) -> None:
    stop = asyncio.Event()  # never set: whoever started this process ends it
    with ExitStack() as opened:
        stores = [opened.enter_context(closing(ReplayStore.open(directory / str(n)))) for n in range(SHARDS)]
        for n, store in enumerate(stores):
            leases = range(n, STEPS * GROUPS, SHARDS)
            for begin in range(0, len(leases), GROUPS_A_SEGMENT):
                some = leases[begin : begin + GROUPS_A_SEGMENT]
                store.append([t for lease in some for t in _group(lease, tokens)])
        async with Bus.connect(BusConfig(url=url), run, name="shards") as bus, asyncio.TaskGroup() as tasks:
            for n, store in enumerate(stores):
                shard = Shard(bus, store, n, shards=SHARDS, was_issued=lambda lease: True, linger_s=0.02)
                tasks.create_task(shard.run(stop))


def main(arguments: list[str]) -> None:
    """Print the figures as JSON; with arguments, be the process of the shards."""
    if arguments:
        url, run, directory, tokens = arguments
        uvloop.run(_serve_shards(url, run, Path(directory), int(tokens)))
        return
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as directory:
        sys.stdout.write(json.dumps(bench_fetch(Path(directory)), indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
