"""Tells what the broker carries, and how long storing takes, where routed experts travel in messages or by
HTTP.

`PYTHONPATH=tests python -m benchmarks.experts_apart` prints a line of JSON. It starts a nats-server and a
process with a shard, and is the actor."""

import asyncio
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import structlog
import uvloop

from benchmarks.many_actors import Server
from benchmarks.replay_workload import Material
from benchmarks.run_bus import make_run
from benchmarks.swarm import PACKAGES
from bus.codec import encode
from bus.config import BusConfig
from bus.connection import Bus
from bus.requests import ReadRequest
from bus.streams.publish import Publisher, together
from bus.trajectory import TrajectoryBatch
from storage.client.expert_reader import ExpertReader
from storage.client.expert_sender import ExpertSender
from storage.disk.run_directory import RunDirectory
from storage.settings.replay import ReplayConfig
from storage.shard.server import Shard
from storage.shard.service import hold_shards

RUN, ROUNDS = "bench", 3
MESSAGES, TOKENS, LAYERS, PER_TOKEN = 48, 8192, 48, 8
"""Trajectories of Qwen3-30B-A3B: 384 bytes of experts a token, 3.3 MB a message."""
TIMEOUT_S = 120.0
"""Longest time that a round may take."""
LOOK_S = 0.01


async def measure() -> dict[str, list[float]]:
    """Return what passed the broker, its CPU time, and the seconds until all was stored and until a learner
    elsewhere had read it, of each round of both ways in turns."""
    found: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as made:
        async with (
            Server(Path(made) / "nats") as server,
            Bus.connect(BusConfig(url=server.url), RUN, name="actor") as bus,
        ):
            await make_run(bus)
            async with _shard(server.url, made):
                for n in range(ROUNDS + 1):  # the first warms up
                    for way in ("bus", "http") if n % 2 == 0 else ("http", "bus"):
                        figures = await _round(server, bus, n, way)
                        for name, value in figures.items() if n else ():
                            found[f"{way}_{name}"].append(value)
    return dict(found)


async def _round(server: Server, bus: Bus, number: int, way: str) -> dict[str, float]:
    lease = number * 2 + (way == "http")
    messages = [_message(lease, n) for n in range(MESSAGES)]
    process = psutil.Process(server.pid)
    carried, cpu = await server.bytes(), sum(process.cpu_times()[:2])
    began, sender, publisher = time.perf_counter(), ExpertSender(bus), Publisher(bus)

    async def publish(n: int) -> None:
        batch = messages[n]
        if way == "http":
            batch = await sender.lightened(0, batch)
            assert batch.apart is not None
        name = f"{number}-{way}-{n}"
        await publisher.publish(bus.subject("trajectories", 0), encode(batch), message_id=name)

    async def read() -> None:
        asked = ReadRequest(lease_ids=(lease,), apart=way == "http")
        subject = bus.subject("rpc", "read", 0)
        answers = await bus.request_many(subject, asked, TrajectoryBatch, timeout_s=TIMEOUT_S)
        [*found] = await ExpertReader(bus).whole(0, answers)
        assert all(one.routed_experts for answer in found for one in answer.sampled)

    async with asyncio.timeout(TIMEOUT_S):
        await together(publish(n) for n in range(MESSAGES))
        stream = bus.topology.stream("TRAJECTORIES")
        while (await bus.js.stream_info(stream)).state.messages:  # noqa: ASYNC110  # a stream has no such event
            await asyncio.sleep(LOOK_S)
    stored, stored_bytes = time.perf_counter(), await server.bytes()
    await read()
    return {
        "stored_s": round(stored - began, 3),
        "stored_broker_mb": round((stored_bytes - carried) / 1e6, 1),
        "read_s": round(time.perf_counter() - stored, 3),
        "read_broker_mb": round((await server.bytes() - stored_bytes) / 1e6, 1),
        "broker_cpu_s": round(sum(process.cpu_times()[:2]) - cpu, 2),
    }


def _message(lease: int, sample: int) -> TrajectoryBatch:
    one = Material(1, TOKENS).trajectory(0, lease * MESSAGES + sample, MESSAGES)
    count = (len(one.token_ids) - 1) * LAYERS * PER_TOKEN
    experts = np.random.default_rng([lease, sample]).integers(0, 128, count, np.uint8)
    one = replace(one, routed_experts=experts.tobytes(), moe_layers=LAYERS, experts_per_token=PER_TOKEN)
    return TrajectoryBatch.of([one])


@asynccontextmanager
async def _shard(url: str, directory: str) -> AsyncIterator[None]:
    """Run a process with the shard."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __spec__.name if __spec__ else __name__, url, directory,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, *PACKAGES])},
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    async with asyncio.timeout(TIMEOUT_S):
        await process.stdout.readline()
    try:
        yield
    finally:
        process.stdin.close()
        await process.wait()


async def _serve(url: str, directory: str) -> None:
    stop, replay = asyncio.Event(), ReplayConfig(shards=1)
    async with (
        Bus.connect(BusConfig(url=url), RUN, name="storage") as bus,
        hold_shards(bus, RunDirectory(Path(directory), RUN), replay, [0]) as [held],
        asyncio.TaskGroup() as tasks,
    ):
        shard = Shard(bus, held.store, 0, shards=1, was_issued=lambda _: True, linger_s=replay.linger_s)
        tasks.create_task(shard.run(stop))
        await shard.serving.wait()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.readline)
        stop.set()


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    if len(sys.argv) > 1:
        uvloop.run(_serve(*sys.argv[1:]))
    else:
        sys.stdout.write(json.dumps(uvloop.run(measure())) + "\n")
