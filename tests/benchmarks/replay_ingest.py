"""Tells what is left of the speed of pulling and acking when a shard decodes, checks and stores before it
acks.

`python -m benchmarks.replay_ingest URL MESSAGES` is the process that publishes for the measurement.
"""

import asyncio
import gc
import shutil
import statistics
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from pathlib import Path

import structlog
import uvloop

from benchmarks.replay_workload import GROUP, TOKENS, Figures, Material, Size
from bus.codec import encode
from bus.config import BusConfig
from bus.connection import Bus
from bus.errors import BusError
from bus.process.child_process import module_command
from bus.process.process_tuning import paced
from bus.server.nats_server import NatsServer
from bus.streams.consume import Inbox
from bus.streams.publish import Publisher
from bus.topology import ensure
from bus.trajectory import TrajectoryBatch
from storage.shard.server import BATCH, Shard
from storage.store.replay import ReplayStore

RUN = "bench"
LOOK_S = 0.003
"""Says how often the stream is asked whether all is acked."""
Step = Callable[[], Coroutine[None, None, None]]
Take = Callable[[], Coroutine[None, None, float]]
"""Returns the moment when all was taken."""


def bench_ingest(directory: Path, size: Size) -> tuple[Figures, Figures]:
    """`stored_over_pull_ack`: the same messages, published the same way while they are taken, on both sides.

    Beside it what each side takes of messages that were all published before."""
    with paced():
        return uvloop.run(_measure(directory, size))


async def _measure(directory: Path, size: Size) -> tuple[Figures, Figures]:
    count = size.messages
    megabytes = sum(map(len, _messages(count))) / 1e6
    async with (
        NatsServer(directory / "bus") as server,
        _publisher(server.url, count) as publish,
        Bus.connect(BusConfig(url=server.url), RUN, name="bench") as bus,
    ):
        await ensure(bus.js, bus.topology, shards=1)

        async def pull() -> float:
            return await _pull_and_ack(bus, count)

        async def store() -> float:
            return await _store(bus, directory / "store", count)

        sides = {
            "publish_pull_ack": (_together, pull),
            "publish_stored_acked": (_together, store),
            "pull_ack": (_after, pull),
            "pull_stored_acked": (_after, store),
        }
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(size.rounds + 1):
            for name, (how, take) in sides.items():
                gc.collect()
                seconds[name].append(await how(publish, take))
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}  # the first warms up
    return {"stored_over_pull_ack": medians["publish_pull_ack"] / medians["publish_stored_acked"]}, {
        "message_KB": 1e3 * megabytes / count,
        **{f"{name}_MB_s": megabytes / taken for name, taken in medians.items()},
        "pull_stored_acked_over_pull_ack": medians["pull_ack"] / medians["pull_stored_acked"],
        "publish_stored_acked_over_pull_ack": medians["pull_ack"] / medians["publish_stored_acked"],
    }


async def _together(publish: Step, take: Take) -> float:
    """Return the seconds until all was published and taken, both at once."""
    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        publishing = tasks.create_task(publish())
        taking = tasks.create_task(take())
        await publishing
        published = time.perf_counter()
    return max(published, taking.result()) - began


async def _after(publish: Step, take: Take) -> float:
    """Return the seconds of taking what was published before."""
    await publish()
    began = time.perf_counter()
    return await take() - began


async def _pull_and_ack(bus: Bus, count: int) -> float:
    """Take and ack so many messages, and do nothing with them; when that was done."""
    inbox = Inbox(bus, "TRAJECTORIES", "shard-0")
    left = count
    while left:
        for raw in await inbox.take(min(BATCH, left)):
            await raw.ack()
            left -= 1
    await _empty(bus)
    done = time.perf_counter()
    await inbox.give_back()
    return done


async def _store(bus: Bus, path: Path, count: int) -> float:
    """Have a shard store so many groups; when that was done, before it ends.

    What it wrote is removed, so that the next gets its memory."""
    stop = asyncio.Event()
    with closing(ReplayStore.open(path)) as store:
        shard = Shard(bus, store, 0, shards=1, was_issued=lambda lease_id: True, linger_s=0.02)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(shard.run(stop))
            async with asyncio.timeout(120):
                while store.trajectories < GROUP * count:  # noqa: ASYNC110  # a shard has no such event
                    await asyncio.sleep(LOOK_S)
            await _empty(bus)
            done = time.perf_counter()
            stop.set()
    shutil.rmtree(path)
    return done


async def _empty(bus: Bus) -> None:
    async with asyncio.timeout(60):
        stream = bus.topology.stream("TRAJECTORIES")
        while (await bus.js.stream_info(stream)).state.messages:  # noqa: ASYNC110  # nor has a stream
            await asyncio.sleep(LOOK_S)


# --- the process that publishes ---


def _messages(count: int) -> list[bytes]:
    material = Material(GROUP * 64, TOKENS)
    groups = (material.trajectories(GROUP * n, GROUP) for n in range(count))
    return [encode(TrajectoryBatch(trajectories=tuple(group))) for group in groups]


@asynccontextmanager
async def _publisher(url: str, count: int) -> AsyncIterator[Step]:
    """Return a call that has another process publish all messages once more, and returns when it has."""
    process = await asyncio.create_subprocess_exec(
        *module_command(__name__, url, str(count)), stdin=PIPE, stdout=PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    writer, reader = process.stdin, process.stdout

    async def said() -> None:
        async with asyncio.timeout(60):
            if not await reader.readline():
                raise BusError("the publishing process ended: its log above says why")

    async def publish() -> None:
        writer.write(b"publish\n")
        await said()

    try:
        await said()  # it is connected
        yield publish
    finally:
        writer.close()
        await process.wait()


async def _serve(url: str, count: int) -> None:
    loop, messages = asyncio.get_running_loop(), _messages(count)
    async with Bus.connect(BusConfig(url=url), RUN, name="publisher") as bus:
        publisher, rounds = Publisher(bus), 0
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while await loop.run_in_executor(None, sys.stdin.readline):
            rounds += 1
            async with asyncio.TaskGroup() as tasks:
                for n, message in enumerate(messages):
                    sending = publisher.publish(
                        bus.subject("trajectories", 0), message, message_id=f"{rounds}-{n}"
                    )
                    tasks.create_task(sending)
            sys.stdout.write("published\n")
            sys.stdout.flush()


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout is a pipe
    uvloop.run(_serve(sys.argv[1], int(sys.argv[2])))
