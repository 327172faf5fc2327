"""Serves blobs over HTTP. Readers fetch them in ranges, several at a time."""

import asyncio
import resource
import socket
import stat
from collections.abc import Iterable
from pathlib import Path

import aiohttp
from aiohttp import web

from bus.blobs import checked
from bus.connection import Bus
from bus.errors import BusError, ConfigError
from bus.messages import BlobRef
from bus.publish import together
from bus.server import is_loopback
from storage.disk.atomic_files import Content, Data
from storage.weights.blob_files import SETTING, SUFFIX, FileBlobs, file_name, new_memory
from storage.weights.transport_config import ServerConfig

RANGE_BYTES = 8 << 20
WINDOW = 8
"""Ranges that are requested at a time."""
TIMEOUT = aiohttp.ClientTimeout(total=None, connect=10, sock_read=30)


class BlobServer:
    """Serves the blobs in a directory, and no other file."""

    def __init__(self, directory: Path, config: ServerConfig, *, setting: str) -> None:
        self._directory = directory
        self._config = config
        self._setting = setting
        self._runner: web.AppRunner | None = None
        self._listening: asyncio.Server | None = None
        self._askers: set[asyncio.BaseProtocol] = set()
        """Connections that have asked for something."""

    async def start(self, bus: Bus) -> str:
        """Begin to serve; return the URL by which others reach this server.

        Raises `ConfigError` when the address is not available, or open to others than the bus is."""
        self._refuse_open_host(bus)
        app = web.Application()
        app.router.add_get("/{name}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await self._runner.setup()
        port = self._config.port
        host = self._config.host or own_address(bus, "")
        loop = asyncio.get_running_loop()
        try:
            self._listening = await loop.create_server(self._admit, host, port)
        except OSError as error:
            await self.close()
            raise ConfigError(
                f"weights cannot be served at {host}:{port} ({error.strerror}): set {self._setting} to "
                f"another, or 0 for any that is free"
            ) from error
        chosen = self._listening.sockets[0].getsockname()[1]
        return self._config.advertise or f"http://{own_address(bus, host)}:{chosen}"

    async def close(self) -> None:
        """Serve no longer."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _refuse_open_host(self, bus: Bus) -> None:
        """Refuse to serve a network where the bus serves this host alone."""
        host, url = self._config.host, bus.client.connected_url
        if host and not is_loopback(host) and url is not None and is_loopback(url.hostname):
            setting = self._setting.rpartition(".")[0]
            raise ConfigError(
                f"{setting}.host={host} would serve weights to everybody on the network, while the bus is on "
                "this host alone: leave it out"
            )

    def _admit(self) -> asyncio.Protocol:
        """Take a connection. Above the bound the oldest of those that never asked for anything ends, or else
        the oldest: neither many nor mute connections cost this process its descriptors."""
        assert self._runner is not None
        server = self._runner.server
        assert server is not None
        here = [one for one in server.connections if one.transport is not None]  # the others are ending
        self._askers.intersection_update(here)
        if len(here) >= most_connections():
            next((one for one in here if one not in self._askers), here[0]).force_close()
        return server()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self._askers.add(request.protocol)
        name = request.match_info["name"]
        path = self._directory / name
        if "/" in name or name.startswith(".") or not name.endswith(SUFFIX) or not _is_own_file(path):
            raise web.HTTPNotFound
        return web.FileResponse(path)  # it knows ranges, and sends them without copying


class HttpBlobs:
    """The publishing side: files in a directory, served by this process."""

    def __init__(self, bus: Bus, directory: Path, config: ServerConfig) -> None:
        self._bus = bus
        self._files = FileBlobs(directory, setting=SETTING + "serve_from")
        self._server = BlobServer(directory, config, setting=SETTING + "port")

    async def start(self) -> None:
        """Begin to serve. Raises `ConfigError` for a directory or an address that cannot be used."""
        await self._files.start()
        self._files.origin = await self._server.start(self._bus)

    async def put(self, content: Content, *tokens: object) -> BlobRef:
        """Write the file; it is served at once."""
        return await self._files.put(content, *tokens)

    async def holds(self, refs: Iterable[BlobRef]) -> bool:
        """Return whether all files are there."""
        return await self._files.holds(refs)

    async def delete(self, ref: BlobRef) -> None:
        """Remove the file."""
        await self._files.delete(ref)

    async def close(self) -> None:
        """Serve no longer."""
        await self._server.close()


async def download(url: str, ref: BlobRef) -> Data:
    """Fetch the bytes behind `ref` from the server at `url`, in ranges.

    Raises `BusError` when it does not answer, does not have them, or has others.
    """
    data = new_memory(ref.size_bytes)
    target = f"{url}/{file_name(ref)}"
    slots = asyncio.Semaphore(WINDOW)

    async def fetch(session: aiohttp.ClientSession, begin: int) -> None:
        end = min(begin + RANGE_BYTES, len(data))
        headers = {"Range": f"bytes={begin}-{end - 1}"}
        async with slots, session.get(target, headers=headers) as response:
            if response.status != 206 or response.content_length != end - begin:
                got = f"status {response.status} and {response.content_length} bytes"
                raise BusError(f"{target}: {got} for those from {begin} to {end}")
            data[begin:end] = await response.read()

    try:
        async with aiohttp.ClientSession(timeout=TIMEOUT, auto_decompress=False) as session:
            await together(fetch(session, begin) for begin in range(0, len(data), RANGE_BYTES))
    except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
        raise BusError(f"{target}: {error!r}") from error
    return await asyncio.to_thread(checked, ref, data)


def most_connections() -> int:
    """Return how many connections a blob server holds: a quarter of the descriptors that it may open."""
    return max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)


def _is_own_file(path: Path) -> bool:
    """Return whether it is a file itself: a link may lead elsewhere, a name may be too long."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def own_address(bus: Bus, host: str) -> str:
    """Return the address by which others reach this host, unless `host` names one."""
    if host not in ("0.0.0.0", "::", ""):
        return host
    url = bus.client.connected_url
    with socket.socket(
        socket.AF_INET, socket.SOCK_DGRAM
    ) as looking:  # connect sends nothing: it asks the routes
        looking.connect((url.hostname if url else "127.0.0.1", (url.port if url else None) or 4222))
        return str(looking.getsockname()[0])
