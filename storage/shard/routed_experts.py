"""Routed experts that actors send to a shard by themselves: files by digest, until their messages are stored.

They are most of a trajectory's bytes where they are recorded, and so need not pass the bus. A file is there
before the message that names it is published, so nothing is lost when its actor ends."""

import asyncio
import hashlib
import os
import re
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import nats.errors
import structlog
from aiohttp import web

from bus.blobs import sha256_of
from bus.codec import Message
from bus.connection import Bus
from bus.errors import BusError, ConfigError, StorageError
from bus.topology import trajectories_stream
from bus.trajectory import ExpertsApart
from bus.waiting import set_within
from bus.weight_requests import ExpertsPlace, ExpertsPlaceAsked
from storage.disk.atomic_files import TEMPORARY_PREFIX
from storage.settings.weights_transport import ServerConfig
from storage.store.replay import ReplayStore
from storage.weights.blob_http import PART_BYTES, STALLED_S, BlobServer, Served

log = structlog.get_logger()
DIRECTORY = ".experts"
"""Name of their directory within that of a shard's store."""
LOOK_S = 600.0
"""Seconds between two looks for files that no message names."""


class ExpertFiles:
    """The routed experts that one shard was sent, by their SHA-256."""

    def __init__(self, store: Path) -> None:
        self._directory = store / DIRECTORY

    @property
    def size_bytes(self) -> int:
        """Return the size of all files, those that are being received included."""
        return sum(found.st_size for _, found in self._found())

    def incoming(self, sha256: str, size_bytes: int) -> "IncomingExperts":
        """Begin a file. Raises `OSError` when the disk refuses."""
        self._directory.mkdir(exist_ok=True)
        return IncomingExperts(self._directory / sha256, size_bytes)

    def holds(self, sha256: str) -> bool:
        """Return whether the file is here."""
        return (self._directory / sha256).is_file()

    def read(self, apart: ExpertsApart) -> bytes | None:
        """Return the routed experts; None where they are not here, or torn by a power cut."""
        try:
            data = (self._directory / apart.digest.hex()).read_bytes()
        except FileNotFoundError:
            return None
        return data[: sum(apart.sizes)] if sha256_of([data]) == apart.digest else None

    def remove(self, apart: ExpertsApart) -> None:
        """Remove what is stored now."""
        (self._directory / apart.digest.hex()).unlink(missing_ok=True)

    def remove_older(self, before_s: float) -> int:
        """Remove files that came before that time; return how many there were."""
        old = [path for path, found in self._found() if found.st_mtime < before_s]
        for path in old:
            path.unlink(missing_ok=True)
        return len(old)

    def _found(self) -> list[tuple[Path, os.stat_result]]:
        if not self._directory.is_dir():
            return []
        found = []
        for path in self._directory.iterdir():
            try:
                found.append((path, path.stat()))
            except FileNotFoundError:  # the file was stored meanwhile
                continue
        return found

    async def tend(self, bus: Bus, shard: int, stop: asyncio.Event) -> None:
        """Until `stop` remove what actors sent who ended before they published its message.

        An actor publishes within its patience for the bus. Once the shard has taken all messages up to one
        time, nothing names what came that much earlier; under load there are always later ones."""
        stream, durable = bus.topology.stream(trajectories_stream(shard)), bus.topology.shard_durable(shard)
        marked_s, mark = 0.0, 0  # a time, and the last message until then
        while not await set_within(stop, LOOK_S):
            looked_s = time.time()
            try:
                waiting = await bus.js.consumer_info(stream, durable)
                last = (await bus.js.stream_info(stream)).state.last_seq
            except nats.errors.Error as error:  # the bus is away: it is asked again
                log.debug("consumer_not_seen", stream=stream, reason=str(error))
                continue
            is_marked = waiting.ack_floor is not None and 0 < mark <= waiting.ack_floor.stream_seq
            is_idle = not waiting.num_pending and not waiting.num_ack_pending
            if is_idle or is_marked:
                before_s = (looked_s if is_idle else marked_s) - bus.patience_s
                if removed := await asyncio.to_thread(self.remove_older, before_s):
                    log.info("routed_experts_removed", shard=shard, files=removed)
            if is_marked or not mark:
                marked_s, mark = looked_s, last


class IncomingExperts:
    """A file that is being received, without its name until it is whole."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        """Reserve the file's size, as far as others count it. Raises `OSError` when the disk refuses."""
        self._path = path
        self._size_bytes = size_bytes
        self._temporary = path.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}")
        self._digest = hashlib.sha256()
        self._file = self._temporary.open("wb")
        os.truncate(self._file.fileno(), size_bytes)

    def add(self, piece: bytes) -> None:
        """Write the next piece. Raises `OSError` when the disk refuses."""
        self._digest.update(piece)
        self._file.write(piece)

    def finish(self) -> bool:
        """Give the file its name, unless its bytes are others than that says; return whether they are not."""
        self._file.close()
        is_same = self._digest.hexdigest() == self._path.name
        if is_same:
            self._temporary.replace(self._path)
        return is_same

    def close(self) -> None:
        """Remove what is not whole. Raises `OSError` when the disk still refuses what was added."""
        try:
            self._file.close()
        finally:
            self._temporary.unlink(missing_ok=True)


class StoredExperts:
    """The routed experts of a stored group, one trajectory after the other, read when the first are sent."""

    def __init__(self, store: ReplayStore, lease_id: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._store = store
        self._lease_id = lease_id
        self._data: bytes | None = None

    def has(self, begin: int, end: int) -> bool:
        return 0 <= begin <= end <= self.size_bytes

    def read(self, begin: int, count: int) -> bytes:
        """Return some of the bytes; none, which cuts the reader off, where the group is gone."""
        if self._data is None:
            try:
                found = self._store.read([self._lease_id])
            except StorageError as error:
                log.warning("group_not_known", lease_id=self._lease_id, reason=str(error))
                return b""
            self._data = b"".join(trajectory.routed_experts for trajectory in found)
        return self._data[begin : begin + count]

    def close(self) -> None:
        self._data = None


class ExpertServer:
    """Takes routed experts for the shards of a process over HTTP, on a secured bus over HTTPS, and serves
    those that are stored. It listens from the moment on when somebody asks where: most runs record none."""

    def __init__(
        self, bus: Bus, stores: Mapping[int, ReplayStore], config: ServerConfig, most_bytes: int
    ) -> None:
        """Take `most_bytes` for each of the shards with these stores."""
        self._bus = bus
        self._stores = {str(shard): store for shard, store in stores.items()}
        self._files = {shard: ExpertFiles(store.directory) for shard, store in self._stores.items()}
        self._most_bytes = most_bytes
        self._readers = secrets.token_urlsafe(32)
        """Beginning of what readers ask for, which actors are not told: they have no right to read."""
        self._writers = secrets.token_urlsafe(32)
        """Beginning of what actors put, so that none puts it to another run's server at an earlier port of
        this one."""
        self._server = BlobServer(self._find, config, setting="replay.server.port", take=self._take)
        self._starting = asyncio.Lock()
        self._url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Answer actors and learners while inside."""
        asked = [
            await self._bus.serve(self._bus.subject("rpc", what, shard), ExpertsPlaceAsked, answer)
            for shard in self._files
            for what, answer in (("experts", self._place), ("stored_experts", self._stored_place))
        ]
        try:
            yield
        finally:
            for subscription in asked if self._bus.client.is_connected else []:
                await subscription.unsubscribe()
            await self._server.close()

    async def _place(self, _: ExpertsPlaceAsked) -> list[Message]:
        async with self._starting:
            if not self._url:
                try:
                    self._url = await self._server.start(self._bus)
                except ConfigError as error:
                    log.warning("routed_experts_not_taken", reason=str(error))
                    raise BusError(str(error)) from error
        return [ExpertsPlace(url=f"{self._url}/{self._writers}-", access=self._server.access)]

    async def _stored_place(self, asked: ExpertsPlaceAsked) -> list[Message]:
        await self._place(asked)
        return [ExpertsPlace(url=f"{self._url}/{self._readers}-", access=self._server.access)]

    def _find(self, name: str) -> Served | None:
        """Return a stored group's routed experts, asked for as `<readers>-<shard>-<lease>-<bytes>`."""
        asked = re.fullmatch(rf"{re.escape(self._readers)}-(\d+)-(\d+)-(\d+)", name)
        store = self._stores.get(asked[1]) if asked is not None else None
        return StoredExperts(store, int(asked[2]), int(asked[3])) if asked and store else None

    async def _take(self, request: web.Request) -> None:
        """Write what is put as `<writers>-<shard>-<SHA-256>`. What is here already is not written again."""
        name = rf"{re.escape(self._writers)}-(\d+)-([0-9a-f]{{64}})"
        put = re.fullmatch(name, request.match_info["name"])
        if put is None or put[1] not in self._files:
            raise web.HTTPNotFound
        shard, sha256 = put.groups()
        size_bytes, files = request.content_length, self._files[shard]
        if size_bytes is None:
            raise web.HTTPLengthRequired
        if await asyncio.to_thread(files.holds, sha256):
            return
        if await asyncio.to_thread(lambda: files.size_bytes) + size_bytes > self._most_bytes:
            raise web.HTTPInsufficientStorage(text=f"{self._most_bytes} bytes wait here already")
        try:
            incoming = await asyncio.to_thread(files.incoming, sha256, size_bytes)
            try:
                await _receive(request, incoming, size_bytes)
                is_same = await asyncio.to_thread(incoming.finish)
            finally:
                await asyncio.to_thread(incoming.close)
        except OSError as error:
            log.warning("routed_experts_not_taken", shard=shard, reason=str(error))
            raise web.HTTPInsufficientStorage(text=str(error)) from error
        if not is_same:
            raise web.HTTPUnprocessableEntity(text="these bytes have another digest")


async def _receive(request: web.Request, incoming: IncomingExperts, size_bytes: int) -> None:
    """Write the body of the request, as long as the sender sends."""
    left = size_bytes
    try:
        while left:
            async with asyncio.timeout(STALLED_S):
                piece = await request.content.readexactly(min(PART_BYTES, left))
            await asyncio.to_thread(incoming.add, piece)
            left -= len(piece)
    except (TimeoutError, asyncio.IncompleteReadError) as error:
        raise web.HTTPRequestTimeout(text=f"{left} of {size_bytes} bytes did not come") from error
