"""Serves blobs over HTTP, on a secured bus over HTTPS to clients with a token. Readers fetch several ranges
at a time."""

import asyncio
import os
import platform
import resource
import socket
import stat
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import aiohttp
import structlog
import xxhash
from aiohttp import web
from nats.aio.subscription import Subscription
from nats.errors import NoRespondersError

from bus.codec import Message
from bus.connection import Bus
from bus.errors import BusError, ConfigError, DamagedError
from bus.messages import BlobRef
from bus.server.nats_server import is_loopback
from bus.streams.blob_store import shown_fetch
from bus.streams.publish import together
from bus.waiting import RETRY_S, cancelled
from bus.weight_requests import BlobAccess, BlobAccessAsked, PartsAsked, PartsFound
from storage.disk.atomic_files import Content, Data
from storage.disk.host_identity import host_identity
from storage.settings.weights_transport import HOST, ServerConfig
from storage.weights.blob_files import SETTING, SUFFIX, FileBlobs, file_name
from storage.weights.blob_guard import SERVER_NAME, BlobGuard, bearer, reader_context
from storage.weights.blob_parts import is_part, part_range, parts_of
from storage.weights.new_memory import new_memory
from storage.weights.part_tracker import PartTracker

log = structlog.get_logger()
WINDOW = 8
"""Parts that are requested at a time."""
PART_BYTES = 1 << 20
"""Bytes that the server reads and sends at a time."""
BOUNDED_BYTES = 64 << 10
"""The same under a bound on the bandwidth: every reader gets some before it gives up waiting."""
STALLED_S = 30.0
"""Seconds after which a reader that takes nothing of what it asked for is cut off."""
HANDSHAKE_S = 10.0
"""Seconds in which a connection has to become a TLS connection."""
BACKLOG = 128
"""Connections that the kernel keeps until they are accepted."""
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
ASK_S = 10.0
"""Longest time that a server may take to say what it asks of its readers."""
HEARD_S = 2.0
"""Seconds in which the servers of a bus have told each other of somebody who serves since a moment ago."""
TIMEOUT = aiohttp.ClientTimeout(total=None, connect=10, sock_read=30)


class Served(Protocol):
    """Bytes that a server has under a name, perhaps not all of them yet."""

    size_bytes: int

    def has(self, begin: int, end: int) -> bool:
        """Tell whether these bytes are there."""

    def read(self, begin: int, count: int) -> Data:
        """Return some of the bytes, at most `count`; it is called on any thread."""

    def close(self) -> None:
        """Read no more."""


class ServedFile:
    """An open file."""

    def __init__(self, file: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._file = file

    def has(self, begin: int, end: int) -> bool:
        return 0 <= begin <= end <= self.size_bytes

    def read(self, begin: int, count: int) -> Data:
        return os.pread(self._file, count, begin)

    def close(self) -> None:
        os.close(self._file)


def file_in(directory: Path, name: str) -> Served | None:
    """Open a blob's file in the directory, and no other; None where there is none."""
    if "/" in name or name.startswith(".") or not name.endswith(SUFFIX):
        return None
    try:
        file = os.open(directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError):  # not there, a link, which may lead elsewhere, or no name of a file
        return None
    found = os.fstat(file)
    if stat.S_ISREG(found.st_mode):
        return ServedFile(file, found.st_size)
    os.close(file)
    return None


Take = Callable[[web.Request], Awaitable[None]]
"""Takes what a request puts under a name. It raises `web.HTTPException` for what it does not take."""


class BlobServer:
    """Serves blobs, or takes them, and nothing else; on a secured bus only for who has its token."""

    def __init__(
        self, find: Callable[[str], Served | None], config: ServerConfig, *, setting: str,
        take: Take | None = None,
    ) -> None:  # fmt: skip
        """Serve what `find` returns for a name, and hand to `take` what is put."""
        self._take = take
        self.sent_bytes = 0
        self._due_s = 0.0
        """Monotonic time until which the bound on the bandwidth is used up."""
        self._find = find
        self._config = config
        self._setting = setting
        self._runner: web.AppRunner | None = None
        self._listening: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._askers: set[asyncio.BaseProtocol] = set()
        """Connections that have asked for something, and may."""
        self._handshakes: dict[asyncio.Task[None], None] = {}
        """Connections that have begun, the oldest first."""
        self._guard: BlobGuard | None = None

    @property
    def access(self) -> BlobAccess | None:
        """Return what readers need to be let in; None where everybody is."""
        return self._guard.access if self._guard is not None else None

    async def start(self, bus: Bus) -> str:
        """Begin to serve; return the URL by which others reach this server. Raises `ConfigError` when the
        address is not available, or open to others than the bus is."""
        self._refuse_open_host(bus)
        self._refuse_open_url(bus)
        self._guard = BlobGuard() if bus.secured else None
        host = self._config.host or own_address(bus, "")
        listening = self._listening = self._listen(host, self._config.port)
        app = web.Application()
        app.router.add_get("/{name}", self._answer)
        if self._take is not None:
            app.router.add_put("/{name}", self._store)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await self._runner.setup()
        self._accepting = asyncio.create_task(self._accept(listening), name="accept readers of weights")
        chosen = listening.getsockname()[1]
        scheme = "https" if bus.secured else "http"
        own = f"{scheme}://{own_address(bus, host)}:{chosen}"
        return (self._config.advertise or own).replace(HOST, platform.node())

    async def close(self) -> None:
        tasks = [*self._handshakes, *([self._accepting] if self._accepting is not None else [])]
        self._accepting = None
        await cancelled(*tasks)
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
                f"{setting}.host={host} would open it to everybody on the network, while the bus is on "
                "this host alone: leave it out"
            )

    def _refuse_open_url(self, bus: Bus) -> None:
        """Refuse to announce a URL by which a token would travel in the clear."""
        url = self._config.advertise or ""
        if bus.secured and url.startswith("http:"):
            setting = self._setting.rpartition(".")[0]
            raise ConfigError(
                f"{setting}.advertise={url}: on a secured bus weights are served over TLS: write https://, "
                "and let what is in between pass the connection on as it is"
            )

    def _listen(self, host: str, port: int) -> socket.socket:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"this process cannot listen at {host}:{port} ({error.strerror}): set {self._setting} to "
                f"another, or 0 for any that is free"
            ) from error
        listening.setblocking(False)
        return listening

    async def _accept(self, listening: socket.socket) -> None:
        """Take connections. asyncio's own server would not let those be counted and ended whose TLS handshake
        goes on."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:  # no descriptor is free, or the reader has gone again
                log.warning("reader_not_accepted", reason=error.strerror)
                await asyncio.sleep(RETRY_S)
                continue
            self._make_room()
            task = asyncio.create_task(self._begin(connection), name="begin a connection")
            self._handshakes[task] = None
            task.add_done_callback(lambda done: self._handshakes.pop(done, None))
            await asyncio.sleep(0)  # the task begins: cancelled before, it would not close the connection

    async def _begin(self, connection: socket.socket) -> None:
        assert self._runner is not None
        assert self._runner.server is not None
        tls: dict[str, Any] = {}
        if self._guard is not None:
            tls = {"ssl": self._guard.context, "ssl_handshake_timeout": HANDSHAKE_S}
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(self._runner.server, connection, **tls)
        except OSError as error:  # ssl.SSLError among them: it is no reader of ours
            log.debug("handshake_failed", reason=str(error))

    def _make_room(self) -> None:
        """End a connection if there are too many: the oldest of those that never asked for anything, or else
        the oldest. Neither many nor mute connections cost this process its descriptors."""
        assert self._runner is not None
        assert self._runner.server is not None
        here = [one for one in self._runner.server.connections if one.transport is not None]
        self._askers.intersection_update(here)  # the others are ending
        if len(here) + len(self._handshakes) < most_connections():
            return
        mute = next((one for one in here if one not in self._askers), None)
        if mute is None and self._handshakes:
            oldest = next(iter(self._handshakes))
            del self._handshakes[oldest]
            oldest.cancel()
        else:
            (mute or here[0]).force_close()

    def _admit(self, request: web.Request) -> None:
        """Raise `HTTPUnauthorized` for a stranger's request."""
        if self._guard is not None:
            self._guard.refuse_stranger(request)
        self._askers.add(request.protocol)

    async def _store(self, request: web.Request) -> web.StreamResponse:
        assert self._take is not None
        self._admit(request)
        await self._take(request)
        return web.Response(status=201)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self._admit(request)
        found = self._find(request.match_info["name"])
        if found is None:
            raise web.HTTPNotFound
        try:
            at_once = PART_BYTES if self._config.bytes_per_s is None else BOUNDED_BYTES
            return await _send(request, found, self._counted, at_once)
        except ConnectionResetError as error:  # aiohttp would log it as an error of this server
            log.debug("reader_gone", name=request.match_info["name"], reason=str(error))
            return web.Response()  # the connection is closed, so nobody gets it
        finally:
            found.close()

    async def _counted(self, sent_bytes: int) -> None:
        """Count bytes that are sent now, and wait as long as the bound on the bandwidth says."""
        self.sent_bytes += sent_bytes
        if self._config.bytes_per_s is not None:
            now = time.monotonic()
            self._due_s = max(self._due_s, now) + sent_bytes / self._config.bytes_per_s
            await asyncio.sleep(self._due_s - now)


async def _send(
    request: web.Request, found: Served, counted: Callable[[int], Awaitable[None]], at_once: int
) -> web.StreamResponse:
    size = found.size_bytes
    try:
        begin, end, _ = request.http_range.indices(size)
    except ValueError:
        raise web.HTTPRequestRangeNotSatisfiable from None
    ranged = "Range" in request.headers
    if ranged and begin >= end:
        raise web.HTTPRequestRangeNotSatisfiable(headers={"Content-Range": f"bytes */{size}"})
    if not found.has(begin, end):
        raise web.HTTPNotFound
    response = web.StreamResponse(status=206 if ranged else 200, headers={"Accept-Ranges": "bytes"})
    response.content_length = end - begin
    if ranged:
        response.headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
    await response.prepare(request)
    while begin < end:
        part = await asyncio.to_thread(found.read, begin, min(at_once, end - begin))
        if not part:
            raise OSError(f"{request.path} was cut while it was read")
        await counted(len(part))
        try:
            async with asyncio.timeout(STALLED_S):
                await response.write(part)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()  # closing would wait for the reader
            raise ConnectionResetError(f"the reader took nothing for {STALLED_S:g} s") from None
        begin += len(part)
    await response.write_eof()
    return response


class HttpBlobs:
    """The publishing side: files in a directory, served by this process."""

    def __init__(self, bus: Bus, directory: Path, config: ServerConfig) -> None:
        self._bus = bus
        self._files = FileBlobs(directory, setting=SETTING + "serve_from")
        self._server = BlobServer(partial(file_in, directory), config, setting=SETTING + "port")
        self._tracker = PartTracker()
        self._part_bytes: dict[str, int] = {}
        """Size of the parts of each blob that is here, by its subject."""
        self._asked: list[Subscription] = []

    @property
    def sent_bytes(self) -> int:
        return self._server.sent_bytes

    async def start(self) -> None:
        """Begin to serve. Raises `ConfigError` for a directory or an address that cannot be used."""
        await self._files.start()
        self._files.origin = origin = await self._server.start(self._bus)
        self._asked = [await self._bus.serve(parts_subject(self._bus, origin), PartsAsked, self._sources)]
        if self._server.access is not None:
            self._asked += [
                await self._bus.serve(_access_subject(self._bus, origin), BlobAccessAsked, self._admit)
            ]
        await self._bus.client.flush()  # requests are heard before anybody is told of the URL

    async def _sources(self, asked: PartsAsked) -> list[Message]:
        part_bytes = self._part_bytes.get(asked.blob)
        if part_bytes is None:
            raise BusError(f"{asked.blob} is not here any more")
        sources = self._tracker.sources(asked, part_bytes)
        directory = str(self._files.directory.absolute())
        return [PartsFound(sources=sources, machine=host_identity(), directory=directory)]

    async def _admit(self, _: BlobAccessAsked) -> list[Message]:
        """Tell a reader what it needs. The bus lets only those ask who may have the weights."""
        assert self._server.access is not None
        return [self._server.access]

    async def put(self, content: Content, *tokens: object) -> BlobRef:
        """Write the file; it is served at once."""
        ref = await self._files.put(content, *tokens)
        self._part_bytes[ref.subject] = ref.part_bytes
        return ref

    async def holds(self, refs: Iterable[BlobRef]) -> bool:
        return await self._files.holds(refs)

    async def delete(self, ref: BlobRef) -> None:
        await self._files.delete(ref)
        self._part_bytes.pop(ref.subject, None)

    async def close(self) -> None:
        for asked in self._asked if self._bus.client.is_connected else []:
            await asked.unsubscribe()
        self._asked = []
        await self._server.close()


async def ask_access(bus: Bus, origin: str) -> BlobAccess | None:
    """Return what the server at `origin` asks of its readers; None where the bus is not a secured one. Raises
    `BusError` when the server does not answer, or is none of a secured run."""
    if not bus.secured:
        return None
    subject, deadline = _access_subject(bus, origin), time.monotonic() + HEARD_S
    while True:
        try:
            return await bus.request(subject, BlobAccessAsked(), BlobAccess, timeout_s=ASK_S)
        except BusError as error:
            nobody = isinstance(error.__cause__, NoRespondersError)
            if not nobody or time.monotonic() > deadline:
                raise
        await asyncio.sleep(RETRY_S)


async def fetch_served(bus: Bus, ref: BlobRef) -> Data:
    """Fetch the bytes behind `ref` from the server that it names. Raises `BusError` as `download` does."""
    return await download(ref.origin, ref, await ask_access(bus, ref.origin))


async def download(url: str, ref: BlobRef, access: BlobAccess | None = None) -> Data:
    """Fetch the bytes behind `ref` from the server at `url`, by parts.

    Raises `BusError` when it does not answer, is not the server that `access` is for, does not have them, or
    has others."""
    parts, data, shown = parts_of(ref), new_memory(ref.size_bytes), shown_access(access)
    slots = asyncio.Semaphore(WINDOW)

    async def fetch(session: aiohttp.ClientSession, part: int) -> None:
        async with slots:
            await fetch_part(session, url, ref, part, data, timeout=TIMEOUT, **shown)
        begin, end = part_range(ref, part)
        advance(end - begin)

    async with aiohttp.ClientSession(auto_decompress=False) as session:
        with shown_fetch(ref) as advance:
            await together(fetch(session, part) for part in parts)
    return data


async def fetch_part(
    session: aiohttp.ClientSession, url: str, ref: BlobRef, part: int, data: memoryview, *,
    timeout: aiohttp.ClientTimeout, **shown: Any,
) -> None:  # fmt: skip
    """Fetch a part of `ref` into its place in `data`, and verify it. Raises `BusError`; `DamagedError` for
    other bytes than it has."""
    begin, end = part_range(ref, part)
    target = f"{url}/{file_name(ref)}"
    await fetch_range(session, target, data[begin:end], begin, timeout=timeout, **shown)
    if not await asyncio.to_thread(is_part, ref, part, data[begin:end]):
        raise DamagedError(f"{target}: part {part} does not have its digest")


def shown_access(access: BlobAccess | None) -> dict[str, Any]:
    """Return the arguments of a request by which a reader is let in, and knows the server."""
    if access is None:
        return {}
    headers = {"Authorization": bearer(access)}
    return {"headers": headers, "ssl": reader_context(access), "server_hostname": SERVER_NAME}


async def fetch_range(
    session: aiohttp.ClientSession, target: str, place: memoryview, begin: int, *,
    timeout: aiohttp.ClientTimeout, headers: Mapping[str, str] = NO_HEADERS, **tls: Any,
) -> None:  # fmt: skip
    """Fetch the bytes from `begin` on into `place`, as many as it has. Raises `BusError`."""
    if headers and not target.startswith("https://"):
        raise BusError(f"{target} is no server of a secured run: its token would travel in the clear")
    end, at = begin + len(place), 0
    asked = {"Range": f"bytes={begin}-{end - 1}", **headers}
    try:
        async with session.get(
            target, headers=asked, allow_redirects=False, timeout=timeout, **tls
        ) as response:
            if response.status != 206 or response.content_length != len(place):
                got = f"status {response.status} and {response.content_length} bytes"
                raise BusError(f"{target}: {got} for those from {begin} to {end}")
            async for piece in response.content.iter_any():
                place[at : at + len(piece)] = piece
                at += len(piece)
    except (aiohttp.ClientError, OSError, ValueError) as error:  # the URL may be any text of another host
        raise BusError(f"{target}: {error!r}") from error


def most_connections() -> int:
    """Return how many connections a blob server holds: a quarter of the descriptors that it may open."""
    return max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)


def _access_subject(bus: Bus, origin: str) -> str:
    return bus.subject("access", xxhash.xxh3_64_hexdigest(origin.encode()))


def parts_subject(bus: Bus, origin: str) -> str:
    """Return the subject on which the learner with the server at `origin` says where parts are."""
    return bus.subject("access", xxhash.xxh3_64_hexdigest(f"{origin} parts".encode()))


def own_address(bus: Bus, host: str) -> str:
    """Return the address by which others reach this host, unless `host` names one."""
    if host not in ("0.0.0.0", "::", ""):
        return host
    url = bus.client.connected_url
    with socket.socket(
        socket.AF_INET, socket.SOCK_DGRAM
    ) as looking:  # a connect sends nothing: the kernel looks up the route
        looking.connect((url.hostname if url else "127.0.0.1", (url.port if url else None) or 4222))
        return str(looking.getsockname()[0])
