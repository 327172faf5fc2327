"""Fetches blobs by parts, from other hosts and from the learner, and serves those that are here meanwhile."""

import asyncio
import os
import platform
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import structlog

from bus.connection import Bus
from bus.errors import BusError, DamagedError, StorageError
from bus.messages import BlobRef
from bus.process.work_progress import Advance
from bus.streams.blob_store import shown_fetch
from bus.waiting import cancelled
from bus.weight_requests import BlobAccess, PartFailed, PartsAsked, PartsFound, PartSource
from storage.disk.atomic_files import Data
from storage.disk.host_identity import host_identity
from storage.settings.weights_transport import PeerConfig
from storage.weights.blob_files import file_name, read_file
from storage.weights.blob_http import (
    ASK_S,
    TIMEOUT,
    BlobServer,
    ask_access,
    fetch_part,
    fetch_range,
    parts_subject,
    shown_access,
)
from storage.weights.blob_parts import part_range
from storage.weights.local_model import take_parts
from storage.weights.new_memory import copied, lend, new_memory, take_back
from storage.weights.part_tracker import FETCHED, HAD, LACKED, SERVED_S, SLOWEST_BYTES_PER_S
from storage.weights.tensors import MAX_HEADER_BYTES

log = structlog.get_logger()
PEER_S = 30.0
"""Seconds after which a part is fetched elsewhere, and more for a large one."""
POLL_S = 0.1
"""Seconds until the learner is asked again where parts are, unless one has come."""
MODEL_TRIES = 2
"""Blobs of which the model's directory may have nothing: adapters may come before the weights below them."""
ORIGIN_FAILURES = 3
"""Failures of the learner's server, without a part that came meanwhile, after which a blob cannot be had."""
Asked = Callable[["HeldBlob", tuple[PartFailed, ...]], PartsAsked]
"""Function that makes the question where parts are, of a blob and of what failed."""


class HeldBlob:
    """A blob of which some parts are here, in memory that its tensors will share."""

    def __init__(self, ref: BlobRef) -> None:
        self.ref = ref
        self.size_bytes = ref.size_bytes
        self.data = new_memory(ref.size_bytes)
        lend(self.data)
        self.states = bytearray(ref.parts)
        self.filling = asyncio.Lock()
        self.readers = 0
        """Readers that wait for the blob to be whole, or copy it."""
        self.is_taken = False
        """Whether a reader has it, whose tensors lie in this memory."""
        self.used_s = time.monotonic()

    @property
    def is_whole(self) -> bool:
        """Tell whether every part is here, verified."""
        return self.states.count(HAD) == self.ref.parts

    def lacks(self, part: int) -> bool:
        """Tell whether the part is neither here nor being fetched."""
        return 0 <= part < self.ref.parts and self.states[part] == LACKED

    def has(self, begin: int, end: int) -> bool:
        """Tell whether these bytes are here, verified."""
        size = self.ref.part_bytes
        return all(state == HAD for state in self.states[begin // size : -(-end // size)])

    def read(self, begin: int, count: int) -> Data:
        """Return bytes; none of what is not here any more."""
        self.used_s = time.monotonic()
        return self.data[begin : begin + count] if self.has(begin, begin + count) else b""

    def close(self) -> None:
        """Do nothing: the memory stays for other readers."""


class Swarm:
    """The parts of blobs that this process has: it takes from other hosts first and from the learner last."""

    def __init__(self, bus: Bus, config: PeerConfig, *, machine: str | None = None) -> None:
        """`machine` is this one: files of a learner's server that lie on it are read there."""
        self._machine = host_identity() if machine is None else machine
        self._bus = bus
        self._config = config
        self._host = f"{platform.node()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._model_tries = MODEL_TRIES if config.model is not None else 0
        self._held: dict[str, HeldBlob] = {}
        """Blobs by the name under which they are served, the oldest first."""
        self._server = BlobServer(self._held.get, config, setting="actors.weights.port")
        self._starting = asyncio.Lock()
        self._again: asyncio.TimerHandle | None = None
        """When the swarm looks again for blobs that are kept for too long."""
        self._url: str | None = None
        """URL at which others get parts; empty for a host that serves none, None before the first fetch."""
        self._near: dict[str, Path | None] = {}
        """Directory of the files of each server of a learner, where they are on this machine."""

    async def get(self, ref: BlobRef) -> Data:
        """Return the bytes behind `ref`. Raises `BusError` where neither hosts nor the learner have a part;
        those that are here by then need not be fetched again."""
        directory = await self._directory(ref)
        if directory is not None:
            try:
                return await asyncio.to_thread(read_file, directory, ref)
            except BusError as error:
                log.warning("file_of_weights_not_read", reason=str(error))
        async with self._starting:
            if self._url is None:
                self._url = await self._server.start(self._bus) if self._config.serve else ""
        name = file_name(ref)
        held = self._held.get(name)
        if held is None or held.ref != ref:
            held = self._held[name] = HeldBlob(ref)
        held.readers += 1
        try:
            async with held.filling:
                return await self._filled(held)
        finally:
            held.readers -= 1
            self._forget()

    async def _directory(self, ref: BlobRef) -> Path | None:
        """Return where the files of the learner's server lie, if this process can read them.

        What they hold needs no connection, and no memory for others, who have the learner as near."""
        if ref.origin not in self._near:
            who = f"{self._host} asks for files"  # and is none of those who serve parts
            asked = PartsAsked(blob=ref.subject, host=who, url="", have=bytes([HAD] * ref.parts))
            subject = parts_subject(self._bus, ref.origin)
            found = await self._bus.request(subject, asked, PartsFound, timeout_s=ASK_S)
            directory = Path(found.directory)
            is_near = bool(found.machine) and found.machine == self._machine
            reads = is_near and os.access(directory / file_name(ref), os.R_OK)
            self._near[ref.origin] = directory if reads else None
        return self._near[ref.origin]

    async def _filled(self, held: HeldBlob) -> Data:
        if not held.is_whole:
            model = self._config.model if self._model_tries > 0 and not any(held.states) else None
            with shown_fetch(held.ref) as advance:
                fetch = _Fetch(self._bus, held, self._asked, advance)
                await fetch.run(model)
            self._model_tries -= model is not None and not fetch.found_in_model
        held.used_s = time.monotonic()
        # the memory goes back with the tensors of one reader, so the next ones have memory of their own
        data = await asyncio.to_thread(copied, held.data) if held.is_taken else held.data
        held.is_taken = True
        return data

    def _asked(self, held: HeldBlob, failed: tuple[PartFailed, ...]) -> PartsAsked:
        return PartsAsked(
            blob=held.ref.subject, host=self._host, url=self._url or "", access=self._server.access,
            have=bytes(held.states), failed=failed,
        )  # fmt: skip

    def _forget(self) -> None:
        """Keep what others may be told to take from here, as far as there is room, and look again then."""
        now, size_bytes = time.monotonic(), sum(held.size_bytes for held in self._held.values())
        idle = [name for name, held in self._held.items() if not held.readers]
        newest = _of_version(self._held[idle[-1]].ref) if idle else ""
        for name in idle:
            held = self._held[name]
            is_over = now - held.used_s > SERVED_S
            too_much = size_bytes > self._config.keep_bytes and _of_version(held.ref) != newest
            if is_over or too_much:
                size_bytes -= held.size_bytes
                del self._held[name]
                held.states[:] = bytes(held.ref.parts)  # for who is reading the blob
                take_back(held.data)
        if self._again is not None:
            self._again.cancel()
        self._again = asyncio.get_running_loop().call_later(SERVED_S, self._forget) if self._held else None

    async def close(self) -> None:
        await self._server.close()
        self._url = None
        self._held.clear()
        self._forget()


class _Fetch:
    """Fetches the parts of one blob that are not here, a few at a time, from where the learner says."""

    def __init__(self, bus: Bus, held: HeldBlob, asked: Asked, advance: Advance) -> None:
        self._bus, self._held, self._asked, self._advance = bus, held, asked, advance
        self._running: dict[asyncio.Task[None], PartSource] = {}
        self._failed: list[PartFailed] = []
        self._liars: set[str] = set()
        """Servers that sent other bytes than a part has."""
        self._origin_failures = 0
        self.found_in_model = 0
        """Parts that the model's directory had."""
        self._shown: dict[BlobAccess | None, dict[str, Any]] = {}
        """Arguments of requests to servers, by what they ask for."""

    async def run(self, model: Path | None) -> None:
        """Return when all parts are here; first those are taken that the directory `model` has. Raises
        `BusError` where a part cannot be had."""
        held, subject = self._held, parts_subject(self._bus, self._held.ref.origin)
        access = await ask_access(self._bus, held.ref.origin)
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            if model is not None:
                await self._take_from(model, session, access)
            try:
                while not held.is_whole:
                    asked = self._asked(held, tuple(self._failed))
                    self._failed.clear()
                    found = await self._bus.request(subject, asked, PartsFound, timeout_s=ASK_S)
                    for source in found.sources:
                        self._begin(session, source, access)
                    await self._some_end()
            finally:
                await cancelled(*self._running)
                await asyncio.gather(*self._running, return_exceptions=True)  # the first error is enough
                for source in self._running.values():
                    held.states[source.part] = LACKED
        with suppress(BusError):  # others may be sent here for all of it; if not, they get it elsewhere
            await self._bus.request(subject, self._asked(held, ()), PartsFound, timeout_s=ASK_S)

    async def _take_from(
        self, model: Path, session: aiohttp.ClientSession, access: BlobAccess | None
    ) -> None:
        """Fill in what a model's directory has of these weights; where it cannot be read, all is fetched."""
        try:
            header = await self._header(session, access)
            found = await asyncio.to_thread(take_parts, model, self._held.ref, header, self._held.data)
        except (BusError, StorageError, OSError) as error:
            log.warning("model_directory_not_used", directory=str(model), reason=str(error))
            return
        self.found_in_model = len(found)
        for part in found:
            self._held.states[part] = HAD
            begin, end = part_range(self._held.ref, part)
            self._advance(end - begin)

    async def _header(self, session: aiohttp.ClientSession, access: BlobAccess | None) -> bytes:
        """Fetch the header of a snapshot from the learner; its first part is verified later. Raises
        `StorageError` for what is no snapshot."""
        ref, data = self._held.ref, self._held.data
        target, shown = f"{ref.origin}/{file_name(ref)}", shown_access(access)
        await fetch_range(session, target, data[:8], 0, timeout=TIMEOUT, **shown)
        size = 8 + int.from_bytes(data[:8], "little")
        if size > min(ref.size_bytes, MAX_HEADER_BYTES):
            raise StorageError(f"{ref.subject} is no snapshot")
        await fetch_range(session, target, data[8:size], 8, timeout=TIMEOUT, **shown)
        return bytes(data[:size])

    def _begin(self, session: aiohttp.ClientSession, source: PartSource, access: BlobAccess | None) -> None:
        """Fetch a part, unless the answer that names the source cannot be the learner's. A forged one would
        have what is here overwritten, or lead to the same liar again and again."""
        if not self._held.lacks(source.part) or source.url in self._liars:
            return
        self._held.states[source.part] = FETCHED
        task = asyncio.create_task(self._part(session, source, access), name=f"part {source.part}")
        self._running[task] = source

    async def _some_end(self) -> None:
        if not self._running:
            await asyncio.sleep(POLL_S)
            return
        ended, _ = await asyncio.wait(self._running, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            source, error = self._running.pop(task), task.exception()
            self._held.states[source.part] = HAD if error is None else LACKED
            if error is None:
                self._origin_failures = 0
                continue
            if not isinstance(error, BusError):
                raise error
            damaged = isinstance(error, DamagedError)
            if damaged and source.url:
                self._liars.add(source.url)
            log.warning("part_not_fetched", part=source.part, url=source.url, reason=str(error))
            self._failed.append(PartFailed(part=source.part, url=source.url, is_damaged=damaged))
            self._origin_failures += not source.url
            if self._origin_failures >= ORIGIN_FAILURES:
                raise error

    async def _part(
        self, session: aiohttp.ClientSession, source: PartSource, access: BlobAccess | None
    ) -> None:
        """Fetch a part and verify it. Raises `BusError`; `DamagedError` for other bytes than it has."""
        ref, access = self._held.ref, source.access if source.url else access
        if self._bus.secured and access is None:
            raise BusError(f"{source.url} asks for no token on a secured bus")
        if access not in self._shown:
            self._shown[access] = shown_access(access)
        begin, end = part_range(ref, source.part)
        await fetch_part(
            session, source.url or ref.origin, ref, source.part, self._held.data,
            timeout=_peer_timeout(end - begin) if source.url else TIMEOUT, **self._shown[access],
        )  # fmt: skip
        self._advance(end - begin)


def _of_version(ref: BlobRef) -> str:
    """Return what the blobs of all ranks of the learner have in common."""
    return ref.subject.rpartition(".")[0]


def _peer_timeout(size_bytes: int) -> aiohttp.ClientTimeout:
    total_s = PEER_S + size_bytes / SLOWEST_BYTES_PER_S
    return aiohttp.ClientTimeout(total=total_s, connect=3, sock_read=5)
