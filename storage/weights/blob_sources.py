"""Sources of published weights for actors: the origin in the reference, or a relay if there is one."""

import asyncio
import math
import os
import shutil
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory, gettempdir
from typing import Protocol
from urllib.parse import urlsplit

import structlog

from bus.codec import Message
from bus.connection import Bus
from bus.errors import BusError, ConfigError, DamagedError
from bus.messages import BlobRef
from bus.weight_requests import BlobAsked, BlobOffer
from storage.disk.atomic_files import Data, lock_directory, lock_file
from storage.settings.weights_transport import TRANSPORTS, RelayConfig
from storage.weights.blob_files import FileBlobs, read_file
from storage.weights.blob_http import BlobServer, download

log = structlog.get_logger()
UNREACHABLE_S = 60.0
"""Seconds for which a relay is not asked after it did not serve what it offered."""
PREFIX = "sluice-relay-"
"""Beginning of the name of a relay's own directory."""
ABANDONED_S = 60.0
"""Age in seconds from which a directory that no process has locked counts as abandoned."""
CANCEL_S = 5.0
"""Seconds after which a cancelled fetch is left behind."""


class BlobSource(Protocol):
    """A source of blobs."""

    async def get(self, ref: BlobRef) -> Data:
        """Return the bytes behind `ref`, verified. Raises `BusError` when they are not available."""


class Blobs:
    """Fetches blobs by the transport that their reference names; HTTP asks a relay first, if there is one."""

    def __init__(self, bus: Bus, config: RelayConfig | None = None) -> None:
        self._bus = bus
        self._config = config or RelayConfig()
        self._dropped: dict[str, float] = {}
        """Relays that are not asked, and until when on the monotonic clock."""

    async def get(self, ref: BlobRef) -> Data:
        """Fetch the bytes behind `ref`. Raises `BusError` when they are gone or damaged."""
        scheme = urlsplit(ref.origin).scheme
        transport = TRANSPORTS.get(scheme)
        if transport is None:
            raise BusError(f"{ref.subject} lies at {ref.origin}: this build knows no transport {scheme!r}")
        relayed = await self._relayed(ref) if transport.relayed and self._config.via else None
        if relayed is not None:
            return relayed
        found: Data = await resolve_name(transport.fetched_by)(self._bus, ref)
        return found

    async def _relayed(self, ref: BlobRef) -> Data | None:
        """Fetch from a relay; return `None` if none has the right bytes: then the origin serves."""
        subject = self._bus.subject("relay", self._config.via)
        try:
            offer = await self._bus.request(
                subject, BlobAsked(blob=ref), BlobOffer, timeout_s=self._config.timeout_s
            )
        except BusError as error:
            log.warning("relay_failed", site=self._config.via, reason=str(error))
            return None
        if time.monotonic() < self._dropped.get(offer.url, 0.0):
            return None
        if self._bus.secured and offer.access is None:
            log.warning("relay_dropped", url=offer.url, reason="it asks for no token on a secured bus")
            return None
        try:
            return await download(offer.url, ref, offer.access)
        except BusError as error:
            for_s = math.inf if isinstance(error, DamagedError) else UNREACHABLE_S
            log.warning("relay_dropped", url=offer.url, for_s=for_s, reason=str(error))
            self._dropped[offer.url] = time.monotonic() + for_s
            return None


class Relay:
    """Fetches each blob once, keeps it as a file, and serves it to hosts that name its site."""

    def __init__(self, bus: Bus, source: BlobSource, config: RelayConfig, directory: Path) -> None:
        self.url = ""
        self._bus = bus
        self._source = source
        self._config = config
        self._files = FileBlobs(directory)
        self._server = BlobServer(directory, config, setting="actors.weights.port")
        self._kept: OrderedDict[BlobRef, None] = OrderedDict()
        self._room = asyncio.Lock()
        """Held while room is made for a blob and it is written."""
        self._fetching: dict[BlobRef, asyncio.Task[Data]] = {}

    async def start(self) -> None:
        """Begin to serve. Raises `ConfigError` for an address that is not available."""
        await self._files.start()
        self.url = await self._server.start(self._bus)
        await self._bus.serve(self._bus.subject("relay", self._config.site), BlobAsked, self._offer)

    async def close(self) -> None:
        """Stop serving and fetching."""
        fetching = list(self._fetching.values())
        for task in fetching:
            task.cancel()
        if fetching:
            await asyncio.wait(fetching, timeout=CANCEL_S)
        await self._server.close()

    async def get(self, ref: BlobRef) -> Data:
        """Return the bytes behind `ref`, fetched once however many ask for them at the same time."""
        if not ref.origin.startswith("http"):  # the bus and shared directories need no relay
            return await self._source.get(ref)
        if ref in self._kept:
            try:
                return await asyncio.to_thread(read_file, self._files.directory, ref)
            except BusError as error:
                log.warning("relayed_file_is_damaged", reason=str(error))
                self._kept.pop(ref, None)  # another request may have dropped it already
        if ref not in self._fetching:
            task = self._fetching[ref] = asyncio.create_task(self._fetch(ref), name=f"relay {ref.subject}")
            task.add_done_callback(lambda _: self._fetching.pop(ref, None))
        fetching = self._fetching[ref]
        try:
            return await asyncio.shield(fetching)
        except asyncio.CancelledError:
            if fetching.cancelled():
                raise BusError(f"{ref.subject}: the relay of {self._config.site} was closed") from None
            raise

    async def _fetch(self, ref: BlobRef) -> Data:
        data = await self._source.get(ref)
        if ref.size_bytes > self._config.keep_bytes:
            log.warning(
                "blob_not_relayed",
                blob=ref.subject,
                size_bytes=ref.size_bytes,
                remedy=f"raise actors.weights.keep_bytes={self._config.keep_bytes}",
            )
            return data
        async with self._room:
            await self._make_room(ref)
            await asyncio.to_thread(self._files.keep, ref, data)
            self._kept[ref] = None
        return data

    async def _make_room(self, ref: BlobRef) -> None:
        """Remove the oldest blobs until this one fits."""
        kept = sum(one.size_bytes for one in self._kept)
        while self._kept and (
            len(self._kept) >= self._config.keep or kept + ref.size_bytes > self._config.keep_bytes
        ):
            oldest, _ = self._kept.popitem(last=False)
            kept -= oldest.size_bytes
            await self._files.delete(oldest)

    async def _offer(self, asked: BlobAsked) -> list[Message]:
        if asked.blob.size_bytes > self._config.keep_bytes:
            raise BusError(f"{asked.blob.subject} exceeds keep_bytes={self._config.keep_bytes}")
        if asked.blob not in self._kept:
            await self.get(asked.blob)
        return [BlobOffer(url=self.url, access=self._server.access)]


@asynccontextmanager
async def blob_source(bus: Bus, config: RelayConfig) -> AsyncIterator[BlobSource]:
    """Return the source of weights of an actor process, which relays them meanwhile if it has a site."""
    blobs = Blobs(bus, config)
    if not config.site:
        yield blobs
        return
    with _cache_directory(config) as directory:
        relay = Relay(bus, blobs, config, directory)
        await relay.start()
        log.info("relay_ready", site=config.site, url=relay.url)
        try:
            yield relay
        finally:
            await relay.close()


@contextmanager
def _cache_directory(config: RelayConfig) -> Iterator[Path]:
    """Make a directory for a relay's blobs, and remove it afterwards. Those of killed relays go too.

    Raises `ConfigError` where it cannot be made."""
    above = config.directory or Path(gettempdir())
    try:
        above.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(above)
        made = TemporaryDirectory(prefix=PREFIX, dir=above)
    except OSError as error:
        raise ConfigError(
            f"a relay cannot keep weights in {above} ({error.strerror}): set actors.weights.directory "
            "to another"
        ) from error
    with made as name, lock_directory(Path(name)):
        yield Path(name)


def _remove_abandoned(above: Path) -> None:
    """Remove the directories of this user's relays that no process holds any more."""
    for found in above.glob(f"{PREFIX}*"):
        with suppress(FileNotFoundError):  # another process removes it too
            seen = found.lstat()
            if seen.st_uid != os.getuid() or time.time() - seen.st_mtime < ABANDONED_S:
                continue
            held = lock_file(found / ".lock")
            if held is not None:
                with held:
                    shutil.rmtree(found)
