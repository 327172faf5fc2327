"""Tells what publishing costs: our publisher against raw TCP and against the C client, in the same run.

`python -m benchmarks.bus` prints the figures as JSON; with arguments it is one of the processes that
it measures. Both publishers keep the same number of deduplicated messages in flight, into a stream in files.
"""

import asyncio
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import uvloop
from nats.js.api import StreamConfig

from bus.config import BusConfig
from bus.connection import Bus
from bus.errors import BusError
from bus.process.child_process import module_command
from bus.server.nats_server import NatsServer, free_port
from bus.streams.publish import Publisher

ROUNDS = 5
SECONDS = 0.7
IN_FLIGHT = {16 << 10: 256, 256 << 10: 64}
"""Messages awaiting their ack, by message size in bytes."""
LIMITS = {
    "publish_16k_over_tcp": 0.15,
    "publish_256k_over_tcp": 0.25,
    "publish_16k_over_c": 0.45,
    "publish_256k_over_c": 0.65,
}
RUN = "bench"
SUBJECT = "bench"
Report = dict[str, dict[str, float | None]]


def bench_bus() -> Report:
    """Ratios, the least they should be, and the medians in MB/s. No C client here: its ratios are null."""
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as directory:
        return asyncio.run(_bench(Path(directory)))


async def _bench(directory: Path) -> Report:
    c_client = await _compiled(directory)
    async with NatsServer(directory / "nats") as server:
        rounds: dict[str, list[float]] = {}
        for _, size in itertools.product(range(ROUNDS), IN_FLIGHT):
            name = f"{size >> 10}k"
            for who, measure in _measures(server.url, c_client, size).items():
                rounds.setdefault(f"{who}_{name}", []).append(await measure())
    report: Report = {"ratios": {}, "limits": dict(LIMITS), "absolute": {}}
    for who, speeds in rounds.items():
        report["absolute"][f"{who}_mb_per_s"] = round(statistics.median(speeds), 1)
    for name in LIMITS:
        _, size_name, _, other = name.split("_")
        ours, theirs = rounds[f"publish_{size_name}"], rounds.get(f"{other}_{size_name}")
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)] if theirs else None
        report["ratios"][name] = round(statistics.median(ratios), 3) if ratios else None
    return report


def _measures(url: str, c_client: Path | None, size: int) -> Mapping[str, Callable[[], Awaitable[float]]]:
    """Return what one round measures of messages of `size`, by name."""

    async def tcp() -> float:
        port = str(free_port("127.0.0.1"))
        receiver = asyncio.create_task(_speed(*OURSELVES, "receive", port))
        await _speed(*OURSELVES, "send", port, str(size))
        return await receiver

    async def publish() -> float:
        await _new_stream(url)
        return await _speed(*OURSELVES, "publish", url, str(size))

    async def publish_with_c() -> float:
        await _new_stream(url)
        return await _speed(str(c_client), url, SUBJECT, str(size), str(SECONDS), str(IN_FLIGHT[size]))

    measures = {"tcp": tcp, "publish": publish}
    return measures if c_client is None else measures | {"c": publish_with_c}


OURSELVES = module_command("benchmarks.bus")


async def _speed(*command: str) -> float:
    """Return what the process prints in the end. Raises `BusError` when it fails."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    printed, complaint = await process.communicate()
    if process.returncode:
        raise BusError(f"{' '.join(command)} failed: {complaint.decode()[-500:]}")
    return float(printed)


async def _compiled(directory: Path) -> Path | None:
    """Return the C publisher, or None where the compiler or libnats-dev is missing."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    program = directory / "bench_c"
    source = Path(__file__).with_name("bus_c_client.c")
    process = await asyncio.create_subprocess_exec(
        compiler, "-O2", "-o", str(program), str(source), "-lnats", stderr=asyncio.subprocess.DEVNULL
    )
    return program if await process.wait() == 0 else None


async def _new_stream(url: str) -> None:
    """Make an empty stream: what earlier rounds stored must not slow the later ones."""
    async with Bus.connect(BusConfig(url=url), RUN, name="bench") as bus:
        name = bus.topology.stream("BENCH")
        if any(info.config.name == name for info in await bus.js.streams_info()):
            await bus.js.delete_stream(name)
        await bus.js.add_stream(StreamConfig(name=name, subjects=[SUBJECT], storage="file"))


# --- the processes that are measured ---


async def _publish(url: str, size: int) -> float:
    async with Bus.connect(BusConfig(url=url), RUN, name="publisher") as bus:
        publisher, data, sent = Publisher(bus, window=IN_FLIGHT[size]), os.urandom(size), itertools.count()
        began = time.perf_counter()

        async def publish_on() -> None:
            while time.perf_counter() - began < SECONDS:
                await publisher.publish(SUBJECT, data, message_id=f"{os.getpid()}-{next(sent)}")

        async with asyncio.TaskGroup() as tasks:
            for _ in range(IN_FLIGHT[size]):
                tasks.create_task(publish_on())
        return next(sent) * size / (time.perf_counter() - began) / 1e6


async def _send(port: int, size: int) -> float:
    data = os.urandom(size)
    async with asyncio.timeout(10):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                break
            except OSError:  # the receiver is not there yet
                await asyncio.sleep(0.01)
    began, sent = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        writer.write(data)
        await writer.drain()
        sent += size
    writer.close()
    await writer.wait_closed()
    return sent / (time.perf_counter() - began) / 1e6


async def _receive(port: int) -> float:
    speed: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        began, received = time.perf_counter(), 0
        while data := await reader.read(1 << 18):
            received += len(data)
        speed.set_result(received / (time.perf_counter() - began) / 1e6)
        writer.close()

    async with await asyncio.start_server(on_connection, "127.0.0.1", port, limit=1 << 20):
        return await speed


def _main(arguments: list[str]) -> None:
    match arguments:
        case []:
            answer = json.dumps(bench_bus(), indent=2)
        case ["publish", url, size]:
            answer = str(uvloop.run(_publish(url, int(size))))
        case ["send", port, size]:
            answer = str(uvloop.run(_send(int(port), int(size))))
        case ["receive", port]:
            answer = str(uvloop.run(_receive(int(port))))
        case _:
            raise SystemExit("usage: python -m benchmarks.bus")
    sys.stdout.write(answer + "\n")


if __name__ == "__main__":
    _main(sys.argv[1:])
