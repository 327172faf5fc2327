"""Three servers, one of them killed under load: what was acked is there, and publishing goes on."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from bus.config import BusConfig, StreamsConfig
from bus.connection import Bus
from bus.errors import BusError
from bus.requests import Waiting
from bus.server.nats_server import ClusterMember, NatsServer, free_port
from bus.streams.consume import Inbox
from bus.streams.publish import Publisher
from bus.topology import ensure, trajectories_streams

SERVERS = 3
SHARDS = 12
"""So many that the streams of all have one leader in a run of 177,147 only: servers draw the leaders."""
READY_TIMEOUT_S = 120


@asynccontextmanager
async def running_cluster(directory: Path) -> AsyncIterator[dict[str, NatsServer]]:
    ports = tuple(free_port("127.0.0.1") for _ in range(SERVERS))
    members = {
        f"n{n}": NatsServer(directory / f"n{n}", cluster=ClusterMember(f"n{n}", port, ports))
        for n, port in enumerate(ports)
    }
    async with AsyncExitStack() as stack:
        for member in members.values():
            await stack.enter_async_context(member)
        yield members


async def ensure_replicated(bus: Bus) -> None:
    """The run's streams and keys on three servers each, and one key, once the cluster has found itself."""
    async with asyncio.timeout(READY_TIMEOUT_S):
        while True:
            try:
                await ensure(bus.js, bus.topology, SHARDS)
                await bus.create_keys()
                await bus.put("policy", Waiting(reason="kept"))  # refused while they have no leader
            except BusError:
                await asyncio.sleep(0.2)
            else:
                return


@pytest.mark.nats
@pytest.mark.slow
async def test_acked_messages_survive_the_death_of_the_streams_leader(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    async with running_cluster(tmp_path) as cluster:
        url = ",".join(member.url for member in cluster.values())
        async with Bus.connect(
            BusConfig(url=url, streams=StreamsConfig(replicas=SERVERS)), "test", name="publisher"
        ) as bus:
            await ensure_replicated(bus)
            load = Load(bus)
            loading = asyncio.create_task(load.run())
            await load.reaches(2000)
            stream = bus.topology.stream("TRAJECTORIES")
            leaders = await leaders_of_shards(bus)
            leader = leaders[0]
            before = len(load.acked_at)
            await cluster[leader].kill()
            await load.reaches(before + 4000)
            load.stop.set()
            await loading
            found = await everything(bus)
            kept = await bus.wait_for("policy", Waiting, timeout_s=30, hint="keys survive as well")
            assert (await bus.js.stream_info(f"KV_{bus.topology.bucket}")).config.num_replicas == SERVERS
            assert kept.reason == "kept"
            assert (await bus.js.stream_info(stream)).cluster.leader != leader
    gap_s = max(later - at for at, later in zip(load.moments, load.moments[1:], strict=False))
    assert len(set(leaders)) > 1
    retries, lost = load.publisher.counts.retries, set(load.acked_at) - found
    with capsys.disabled():
        print(  # noqa: T201 - the figure is what one runs this for
            f"\nleader killed under load: {len(load.acked_at)} acked, {len(lost)} lost, "
            f"longest gap {gap_s:.2f} s, {retries} retries"
        )
    assert not lost
    assert gap_s < 15


class Load:
    """Publishes without pause, and keeps when each message was acked."""

    def __init__(self, bus: Bus) -> None:
        self.publisher = Publisher(bus, window=32)
        self.stop = asyncio.Event()
        self.acked_at: dict[str, float] = {}
        self._bus = bus

    @property
    def moments(self) -> list[float]:
        return sorted(self.acked_at.values())

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for n in range(32):
                tasks.create_task(self._publish(n))

    async def _publish(self, worker: int) -> None:
        n = 0
        while not self.stop.is_set():
            name = f"{worker}-{n}"
            subject = self._bus.subject("trajectories", worker % SHARDS)
            await self.publisher.publish(subject, name.encode().ljust(4096), message_id=name)
            self.acked_at[name] = time.monotonic()
            n += 1

    async def reaches(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.acked_at) < count:  # noqa: ASYNC110 - it has no event for it
                await asyncio.sleep(0.005)


async def leaders_of_shards(bus: Bus) -> list[str]:
    """The server that leads the stream of each shard's trajectories."""
    names = map(bus.topology.stream, trajectories_streams(SHARDS))
    return [str((await bus.js.stream_info(name)).cluster.leader) for name in names]


async def everything(bus: Bus) -> set[str]:
    """The names of all messages in the streams of all shards, none of which may be there twice."""
    found: list[str] = []
    async with asyncio.timeout(60):
        for shard, name in enumerate(trajectories_streams(SHARDS)):
            inbox = Inbox(bus, name, f"shard-{shard}")
            left = (await bus.js.stream_info(bus.topology.stream(name))).state.messages
            while left > 0:
                for raw in await inbox.take(1000):
                    found.append(raw.data.decode().strip())
                    await raw.ack()
                    left -= 1
    assert len(set(found)) == len(found)
    return set(found)
