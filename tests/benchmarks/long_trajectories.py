"""What long trajectories cost in memory, from the actor that publishes a group to the learner that reads it.

`python -m benchmarks.long_trajectories` prints for each size of a group by how much the memory of
actor, shards and reader rises above what the process has before. With arguments it is the actor or the
reader. The shards are those of `benchmarks.replay_leases`; the group comes over the bus each way.
"""

import asyncio
import json
import sys
import tempfile
from asyncio.subprocess import PIPE
from pathlib import Path

import psutil
import uvloop

from benchmarks.replay_leases import RUN, SHARDS, _part
from benchmarks.replay_workload import Figures, Material
from bus.codec import encode
from bus.config import BusConfig
from bus.connection import Bus
from bus.connection.status import peak_rss_bytes
from bus.errors import BusError
from bus.process.child_process import module_command
from bus.requests import ReadRequest, StoredGroups, StoredRequest
from bus.server.nats_server import NatsServer
from bus.streams.publish import Publisher
from bus.topology import ensure, shard_of
from bus.trajectory import TrajectoryBatch

SIZES = {
    "8 of 32k": (8, 32_000),
    "1 of 256k": (1, 256_000),
    "8 of 256k": (8, 256_000),
    "16 of 256k": (16, 256_000),
}
TIMEOUT_S = 120.0
MIB = 1 << 20


async def measure() -> dict[str, Figures]:
    """Return what each size costs, in MB, with the shards started anew for it."""
    return {name: await _size(group, tokens) for name, (group, tokens) in SIZES.items()}


async def _size(group: int, tokens: int) -> Figures:
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as directory:
        async with (
            NatsServer(Path(directory) / "bus") as server,
            Bus.connect(BusConfig(url=server.url), RUN, name="bench") as bus,
        ):
            await ensure(bus.js, bus.topology, SHARDS)
            async with _part("shards", server.url, Path(directory)) as (shards, _):
                before = psutil.Process(shards).memory_info().rss
                sent = await _child("send", server.url, str(group), str(tokens))
                await _stored(bus)
                stored = peak_rss_bytes(shards)
                read = await _child("read", server.url)
                after = peak_rss_bytes(shards)
    return {
        "group_mb": round(sent[0] / MIB, 1),
        "actor_mb": round(sent[1] / MIB, 1),
        "shard_storing_mb": round((stored - before) / MIB, 1),
        "shard_storing_and_reading_mb": round((after - before) / MIB, 1),
        "reader_mb": round(read[1] / MIB, 1),
    }


async def _stored(bus: Bus) -> None:
    subject = bus.subject("rpc", "stored", shard_of(0, SHARDS))
    async with asyncio.timeout(TIMEOUT_S):
        while not (await bus.request(subject, StoredRequest(after=0), StoredGroups, timeout_s=10)).total:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def _child(*arguments: str) -> list[int]:
    process = await asyncio.create_subprocess_exec(
        *module_command("benchmarks.long_trajectories", *arguments), stdout=PIPE
    )
    async with asyncio.timeout(TIMEOUT_S):
        said, _ = await process.communicate()
    if process.returncode:
        raise BusError(f"the part {arguments[0]} of the bench ended with {process.returncode}: see above")
    found: list[int] = json.loads(said)
    return found


async def _send(url: str, group: int, tokens: int) -> list[int]:
    """Publish the group of lease 0. Returns its bytes on the bus, and the rise of this process's memory."""
    material = Material(1, tokens)
    async with Bus.connect(BusConfig(url=url), RUN, name="actor") as bus:
        before = psutil.Process().memory_info().rss
        members = tuple(material.trajectory(0, n, group) for n in range(group))
        data = encode(TrajectoryBatch(trajectories=members))
        await Publisher(bus).publish(bus.subject("trajectories", 0), data, message_id="g00000000")
        return [len(data), peak_rss_bytes() - before]


async def _read(url: str) -> list[int]:
    """Read the group of lease 0. Returns its tokens, and the rise of this process's memory."""
    async with Bus.connect(BusConfig(url=url), RUN, name="learner") as bus:
        before = psutil.Process().memory_info().rss
        subject, request = bus.subject("rpc", "read", 0), ReadRequest(lease_ids=(0,))
        found = await bus.request_many(subject, request, TrajectoryBatch, timeout_s=TIMEOUT_S)
        tokens = sum(len(one.token_ids) for batch in found for one in batch.trajectories)
        return [tokens, peak_rss_bytes() - before]


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(json.dumps(uvloop.run(measure()), indent=2))  # noqa: T201 - the user's terminal
    elif sys.argv[1] == "send":
        print(uvloop.run(_send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))  # noqa: T201 - a pipe
    else:
        print(uvloop.run(_read(sys.argv[2])))  # noqa: T201 - a pipe
