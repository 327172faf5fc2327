"""Serves blobs over HTTP. Readers fetch them in ranges, several at a time."""

import asyncio
import socket
from collections.abc import Iterable
from pathlib import Path

import aiohttp
from aiohttp import web

from bus.blobs import checked
from bus.connection import Bus
from bus.errors import BusError, ConfigError
from bus.messages import BlobRef
from bus.publish import together
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

    async def start(self, bus: Bus) -> str:
        """Begin to serve; return the URL by which others reach this server.

        Raises `ConfigError` when the address is not available."""
        app = web.Application()
        app.router.add_get("/{name}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await self._runner.setup()
        host, port = self._config.host, self._config.port
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            await self.close()
            raise ConfigError(
                f"weights cannot be served at {host}:{port} ({error.strerror}): set {self._setting} to "
                f"another, or 0 for any that is free"
            ) from error
        chosen = self._runner.addresses[0][1]
        return self._config.advertise or f"http://{own_address(bus, host)}:{chosen}"

    async def close(self) -> None:
        """Serve no longer."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        path = self._directory / name
        if "/" in name or name.startswith(".") or not name.endswith(SUFFIX) or not path.is_file():
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
