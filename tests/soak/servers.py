"""The servers of a soaked run's bus: one or a cluster, kept alive, each reached over a link."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import structlog
from nats.errors import Error as NatsError

from bus.config import BusConfig
from bus.connection.bus import Bus
from bus.errors import BusError, ConfigError
from bus.messages import RoleHolder
from bus.server.nats_server import ClusterMember, NatsServer, free_port
from bus.waiting import cancelled
from launch.services.write_check import until_a_stream_breaks, until_it_cannot_store
from soak.link import HOST, FaultyLink
from storage.disk.file_errors import lack_of_room

log = structlog.get_logger()
AGAIN_S = 1.0
"""Pause before a server that did not start is started again."""
LEADER_TIMEOUT_S = 5.0
HEALTH_S = 2.0
UNAVAILABLE = 503
ACKS = (b"", b"+ACK")
"""What a client sends once it has done with a message; while it works on one, it sends another word."""


class Server:
    """One server, which is started again whenever it ends, unless it is held down."""

    def __init__(self, directory: Path, port: int, cluster: ClusterMember | None) -> None:
        self.directory = directory
        self.link = FaultyLink(port)
        self.up = asyncio.Event()
        """While it is not set, the server stays down once it has ended."""
        self.up.set()
        self.restarts = -1
        self.pid: int | None = None
        """Process id; None while it is down or ends."""
        self.down = asyncio.Event()
        """Says whether no process of it runs."""
        self.down.set()
        self._is_alone = cluster is None
        self._health_port = free_port(HOST)
        self._nats = NatsServer(directory, port=port, cluster=cluster, http_port=self._health_port)

    @property
    def url(self) -> str:
        """URL of the link to it."""
        return f"nats://{HOST}:{self.link.port}"

    async def keep(self) -> None:
        """Keep it running until cancelled, as `launch bus` does."""
        try:
            while True:
                await self.up.wait()
                try:
                    await self._nats.start()
                except (ConfigError, OSError) as error:  # the disk may be full at present
                    log.warning("server_not_started", reason=str(error))
                    await asyncio.sleep(AGAIN_S)
                    continue
                self.restarts += 1
                self.down.clear()
                self.pid = self._nats.pid
                await self._until_useless()
                self.pid = None
                await self._nats.stop()
                self.down.set()
        finally:
            await self._nats.stop()

    async def _until_useless(self) -> None:
        """Return when the server has ended, or cannot store any more after its disk was full."""
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(self._nats.wait())]
        if self._is_alone:
            tasks.append(asyncio.create_task(until_it_cannot_store(self._nats.url)))
            tasks.append(asyncio.create_task(until_a_stream_breaks(self._nats.http_url)))
        else:
            tasks.append(asyncio.create_task(until_jetstream_is_off(self._health_port)))
            tasks.append(asyncio.create_task(until_disk_was_full(self.directory)))
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await cancelled(*tasks)


async def until_jetstream_is_off(port: int) -> None:
    """Return when a member of a cluster says that it stores nothing any more, as it does after a full disk.

    The others go on without it, and a cluster stops where most are so: an operator's probe restarts it."""
    timeout = aiohttp.ClientTimeout(total=HEALTH_S)
    async with aiohttp.ClientSession(f"http://{HOST}:{port}", timeout=timeout) as session:
        while True:
            with suppress(aiohttp.ClientError, TimeoutError):  # it starts, ends, or is suspended by a fault
                async with session.get("/healthz?js-enabled-only=true") as answer:
                    if answer.status == UNAVAILABLE:
                        return
            await asyncio.sleep(AGAIN_S)


async def until_disk_was_full(directory: Path) -> None:
    """Return once the disk of a server was full and has room: some streams it writes no more until it starts
    again."""
    for is_full in (True, False):
        while bool(lack_of_room(directory)) is not is_full:  # noqa: ASYNC110 - of a disk nobody sets an event
            await asyncio.sleep(AGAIN_S / 2)


class BusServers:
    """All servers of the bus."""

    def __init__(self, directory: Path, count: int) -> None:
        routes = tuple(free_port(HOST) for _ in range(count))
        members = [
            ClusterMember(f"n{n}", port, routes) if count > 1 else None for n, port in enumerate(routes)
        ]
        self.servers = [
            Server(directory / f"n{n}", free_port(HOST), member) for n, member in enumerate(members)
        ]
        self.lock = asyncio.Lock()
        """Held while somebody does something to servers or their directories."""

    @property
    def url(self) -> str:
        """URL of the bus for its clients."""
        return ",".join(server.url for server in self.servers)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run servers and links while inside."""
        tasks = [asyncio.create_task(server.link.run()) for server in self.servers]
        tasks += [asyncio.create_task(server.keep()) for server in self.servers]
        try:
            yield
        finally:
            await cancelled(*tasks)

    async def leader(self, run: str, stream: str) -> Server | None:
        """Return the server that leads a stream of the run; None when nobody says so in time."""
        try:
            async with (
                asyncio.timeout(LEADER_TIMEOUT_S),
                Bus.connect(BusConfig(url=self.url), run, name="soak") as bus,
            ):
                found = (await bus.js.stream_info(bus.topology.stream(stream))).cluster
        except (OSError, NatsError, BusError):  # TimeoutError is an OSError
            return None
        number = (found.leader or "").removeprefix("n") if found is not None else ""
        return self.servers[int(number)] if number.isdigit() else None

    async def holder(self, run: str, role: str) -> int | None:
        """Return the process that holds a role of the run now; None when nobody does, or says so in time."""
        try:
            async with (
                asyncio.timeout(LEADER_TIMEOUT_S),
                Bus.connect(BusConfig(url=self.url), run, name="soak") as bus,
            ):
                found = await bus.get(f"role.{role}", RoleHolder)
        except (OSError, NatsError, BusError):  # TimeoutError is an OSError
            return None
        return found[0].pid if found is not None else None

    async def on_ack(self, run: str, stream: str, within_s: float, strike: Callable[[], None]) -> None:
        """Call `strike` at the moment when storage acks trajectories of a stream, if it does so in time."""
        try:
            async with (
                asyncio.timeout(within_s),
                Bus.connect(BusConfig(url=self.url), run, name="soak") as bus,
            ):
                acks = await bus.client.subscribe(f"$JS.ACK.{bus.topology.stream(stream)}.>")
                async for message in acks.messages:
                    if message.data in ACKS:
                        strike()
                        return
        except (OSError, NatsError, BusError) as error:  # TimeoutError is an OSError
            log.debug("no_ack_heard", reason=repr(error))


def copy_tree(source: Path, target: Path) -> None:
    """Make `target` a copy of `source` as it is now; files that vanish meanwhile are left out."""
    shutil.rmtree(target, ignore_errors=True)
    try:
        shutil.copytree(source, target)
    except shutil.Error as error:
        log.debug("not_all_copied", reason=str(error)[:200])
