"""Tells what the learner sends when several processes receive the same weights and pass parts on or do not,
and that all arrive though processes are killed."""

import asyncio
import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from benchmarks.run_bus import make_run
from bus.codec import Json, decode, encode
from bus.config import BusConfig
from bus.connection.bus import Bus
from bus.messages import BlobRef
from bus.server.nats_server import NatsServer
from storage.settings.weights_transport import HttpTransport, PeerConfig
from storage.weights.blob_http import HttpBlobs
from storage.weights.blob_sources import Blobs
from storage.weights.swarm import Swarm

RUN = "bench"
RANDOM_BYTES = 64 << 20
"""Repeated where more are sent."""
TIMEOUT_S = 300.0
PACKAGES = [str(above) for above in (Path(__file__).parents[2], Path(__file__).parents[1])]
"""Directories of the product's packages and, behind them, of `benchmarks`."""


class Receiver:
    """A process that fetches a blob, and serves its parts until it is ended."""

    def __init__(self, url: str, ref: BlobRef, *, passes_on: bool) -> None:
        self._arguments = (url, encode(ref).hex(), "1" if passes_on else "")
        self._process: asyncio.subprocess.Process | None = None
        self.loop_s = 0.0
        """Processor time that its event loop took for the fetch."""

    async def start(self) -> None:
        """Return when the process is connected."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, *self._arguments,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, *PACKAGES])},
        )  # fmt: skip
        await self._line()

    async def fetch(self) -> float:
        """Have it fetch, and return the seconds until all was there, verified."""
        process = self._running()
        assert process.stdin is not None
        process.stdin.write(b"\n")
        seconds, self.loop_s = map(float, (await self._line()).split())
        return seconds

    async def kill(self) -> None:
        """Kill the process."""
        self._running().kill()
        await self._running().wait()

    def _running(self) -> asyncio.subprocess.Process:
        assert self._process is not None
        return self._process

    async def _line(self) -> bytes:
        stdout = self._running().stdout
        assert stdout is not None
        async with asyncio.timeout(TIMEOUT_S):
            return await stdout.readline()


async def bench_swarm(*, receivers: int, size_mb: int, rounds: int, kills: int) -> dict[str, Json]:
    """Return copies that the learner sent and seconds until all had the blob, with peers and without in turn,
    and the copies that it sent while processes were killed."""
    found: dict[str, list[float]] = defaultdict(list)
    async with serving() as (bus, store):
        for n in range(rounds):
            for passes_on in (True, False) if n % 2 == 0 else (False, True):
                ref = await store.put(content(size_mb << 20), n, passes_on)
                sent = store.sent_bytes
                hosts = [Receiver(url_of(bus), ref, passes_on=passes_on) for _ in range(receivers)]
                await asyncio.gather(*(host.start() for host in hosts))
                began = time.monotonic()
                await asyncio.gather(*(host.fetch() for host in hosts))
                mode = "peers" if passes_on else "alone"
                found[f"s_{mode}"].append(round(time.monotonic() - began, 3))
                found[f"copies_{mode}"].append(round((store.sent_bytes - sent) / ref.size_bytes, 3))
                await asyncio.gather(*(host.kill() for host in hosts))
                await store.delete(ref)
        longest_s = max(found["s_peers"])
        copies = await kill_at_random(
            bus, store, receivers=receivers, size_bytes=size_mb << 20, kills=kills, longest_s=longest_s
        )
    return {**{name: list(values) for name, values in found.items()}, "copies_with_kills": copies}


async def kill_at_random(
    bus: Bus, store: HttpBlobs, *, receivers: int, size_bytes: int, kills: int, longest_s: float
) -> float:
    """Kill a process within `longest_s` of its transfer, and start another in its place, so many times.

    Returns how many copies the learner sent until every place has one. Raises where a process ends otherwise,
    and `TimeoutError` where a copy does not arrive."""
    draw = random.Random(0)
    ref = await store.put(content(size_bytes), "kills")
    sent, lives = store.sent_bytes, [kills // receivers + (n < kills % receivers) for n in range(receivers)]

    async def place(n: int) -> None:
        for _ in range(lives[n]):
            host = Receiver(url_of(bus), ref, passes_on=True)
            await host.start()
            fetching = asyncio.create_task(host.fetch())
            await asyncio.wait({fetching}, timeout=draw.uniform(0, longest_s))
            await host.kill()
            await asyncio.gather(fetching, return_exceptions=True)
        host = Receiver(url_of(bus), ref, passes_on=True)
        await host.start()
        await host.fetch()
        last.append(host)

    last: list[Receiver] = []
    await asyncio.gather(*(place(n) for n in range(receivers)))
    await asyncio.gather(*(host.kill() for host in last))
    await store.delete(ref)
    return round((store.sent_bytes - sent) / size_bytes, 3)


@asynccontextmanager
async def serving(bytes_per_s: int | None = None) -> AsyncIterator[tuple[Bus, HttpBlobs]]:
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as made:
        async with (
            NatsServer(Path(made) / "nats") as server,
            Bus.connect(BusConfig(url=server.url), RUN, name="learner") as bus,
        ):
            await make_run(bus)
            store = HttpBlobs(bus, Path(made) / "weights", HttpTransport(bytes_per_s=bytes_per_s))
            await store.start()
            yield bus, store
            await store.close()


def content(size_bytes: int) -> list[bytes]:
    block = os.urandom(min(size_bytes, RANDOM_BYTES))
    return [(block * (size_bytes // len(block) + 1))[:size_bytes]]


def url_of(bus: Bus) -> str:
    url = bus.client.connected_url
    assert url is not None
    return str(url.geturl())


async def _receive(url: str, ref: BlobRef, *, passes_on: bool) -> None:
    async with Bus.connect(BusConfig(url=url), RUN, name=f"receiver-{os.getpid()}") as bus:
        blobs = Blobs(bus, Swarm(bus, PeerConfig(), machine="another") if passes_on else None)
        _tell("ready")
        await asyncio.to_thread(sys.stdin.readline)
        began, loop_began = time.monotonic(), time.thread_time()
        await blobs.get(ref)
        _tell(f"{time.monotonic() - began} {time.thread_time() - loop_began}")
        await asyncio.to_thread(sys.stdin.readline)  # until it is killed, or who started it ends


def _tell(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    asyncio.run(
        _receive(sys.argv[1], decode(bytes.fromhex(sys.argv[2]), BlobRef), passes_on=bool(sys.argv[3]))
    )
