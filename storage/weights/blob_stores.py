"""Stores of published weights, from which actors fetch: a protocol, and one class for each transport."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from pkgutil import resolve_name
from typing import Protocol

import nats.errors
import structlog
from nats.js.errors import NotFoundError

from bus.connection import Bus
from bus.errors import BusError, ConfigError
from bus.messages import BlobRef
from bus.streams.blob_store import delete_blob, in_chunks, put_chunks, stream_with
from bus.streams.publish import Publisher
from storage.disk.atomic_files import Content
from storage.settings.weights_transport import BusTransport, FilesTransport, HttpTransport, Transport
from storage.weights.blob_files import FileBlobs, of_rank
from storage.weights.blob_http import HttpBlobs

log = structlog.get_logger()


class BlobStore(Protocol):
    """The publishing side of a transport. A blob never changes; readers check its digest."""

    async def start(self) -> None:
        """Prepare the store, and remove blobs of an earlier learner. Raises `ConfigError` when it cannot work
        here."""

    async def put(self, content: Content, *tokens: object) -> BlobRef:
        """Store `content` under a name made of `tokens`; it can be fetched when this returns."""

    async def holds(self, refs: Iterable[BlobRef]) -> bool:
        """Return whether all these blobs are still there."""

    async def delete(self, ref: BlobRef) -> None:
        """Free the blob's space; deleting twice is no error."""

    async def close(self) -> None:
        """Serve no longer."""


class BusBlobs:
    """Numbered chunks on the run's WEIGHTS stream."""

    def __init__(self, bus: Bus, rank: int = 0) -> None:
        self._bus, self._rank = bus, rank
        self._publisher = Publisher(bus)
        self._stream = bus.topology.stream("WEIGHTS")

    async def start(self) -> None:
        """Remove the weights of the learner before this one from the bus, on rank 0."""
        if self._rank > 0:
            return
        subject = self._bus.subject("weights", "policy", ">")

        async def purge() -> None:
            try:
                await self._bus.js.purge_stream(self._stream, subject=subject)
            except nats.errors.Error as error:
                raise BusError(
                    f"cannot free {self._stream} of the last learner's weights: {error}"
                ) from error

        await self._bus.patiently(purge, "freeing the weights of the learner before")

    async def put(self, content: Content, *tokens: object) -> BlobRef:
        """Store the blob in chunks. Raises `ConfigError` when the stream is too small for such blobs."""
        cut = await asyncio.to_thread(in_chunks, content)
        await self._refuse_too_large(cut.size_bytes)
        return await put_chunks(self._bus, self._publisher, cut, "policy", *tokens, stream="weights")

    async def holds(self, refs: Iterable[BlobRef]) -> bool:
        return await on_bus(self._bus, refs)

    async def delete(self, ref: BlobRef) -> None:
        await delete_blob(self._bus, ref)

    async def close(self) -> None:
        """Do nothing: nothing is open."""

    async def _refuse_too_large(self, size: int) -> None:
        if size < 64 << 20:
            return
        limit = await _stream_bytes(self._bus)
        if not BusTransport().fits(size, limit):
            raise ConfigError(
                f"{size} bytes of weights are too much for the {limit} bytes of {self._stream}, which keeps "
                "several versions: set learner.publication.transport.type to auto, http or files"
            )


async def _stream_bytes(bus: Bus) -> int:
    """Return how many bytes the stream WEIGHTS holds; 0 means any number."""
    name = bus.topology.stream("WEIGHTS")

    async def look() -> int:
        try:
            return max((await bus.js.stream_info(name)).config.max_bytes or 0, 0)
        except nats.errors.Error as error:
            raise BusError(f"cannot look at {name}: {error}") from error

    return await bus.patiently(look, f"looking at {name}")


async def chosen_transport(bus: Bus, config: Transport, size_bytes: int) -> Transport:
    """Return the transport for weights of `size_bytes`: the configured one, or what that chooses."""
    limit = await _stream_bytes(bus)
    chosen = config.chosen(size_bytes, limit)
    log.info("transport_chosen", type=chosen.type, weights_bytes=size_bytes, stream_bytes=limit)
    return chosen


def blob_store(bus: Bus, config: Transport, directory: Path, rank: int = 0) -> BlobStore:
    """Return the configured store of a rank; `directory` is the run's own, for files that the learner serves.
    Rank 0 starts its store before any other puts something into its own."""
    store: BlobStore = resolve_name(config.opened_by)(bus, config, directory, rank)
    return store


def bus_blobs(bus: Bus, _config: BusTransport, _directory: Path, rank: int) -> BlobStore:
    """Return a store on the stream WEIGHTS."""
    return BusBlobs(bus, rank)


def file_blobs(bus: Bus, config: FilesTransport, _directory: Path, rank: int) -> BlobStore:
    """Return a store in the run's subdirectory of what all hosts mount."""
    return FileBlobs(of_rank(config.directory / bus.topology.run, rank))


def http_blobs(bus: Bus, config: HttpTransport, directory: Path, rank: int) -> BlobStore:
    """Return a store that this process serves."""
    return HttpBlobs(bus, of_rank(config.serve_from or directory, rank), config.of_rank(rank))


async def delete_blobs(store: BlobStore, blobs: Iterable[BlobRef]) -> set[BlobRef]:
    """Delete blobs of old weights; return those that are gone. Whoever asks tries the others again later."""
    gone = set[BlobRef]()
    for blob in blobs:
        try:
            await store.delete(blob)
        except (BusError, OSError) as error:
            log.warning("old_weights_not_deleted", blob=blob.subject, reason=str(error))
        else:
            gone.add(blob)
    return gone


async def on_bus(bus: Bus, refs: Iterable[BlobRef]) -> bool:
    """Return whether every chunk of `refs` is on the run's streams, by one look at the subjects of each. It
    waits while the bus is away."""
    by_stream: defaultdict[str, list[BlobRef]] = defaultdict(list)
    for ref in refs:
        by_stream[stream_with(bus, ref)].append(ref)
    return all([await _on_stream(bus, stream, found) for stream, found in by_stream.items()])


async def _on_stream(bus: Bus, stream: str, refs: Iterable[BlobRef]) -> bool:
    async def subjects() -> dict[str, int]:
        try:
            found = await bus.js.stream_info(stream, subjects_filter=">")
        except NotFoundError:  # the bus lost its disk, and storage has not created the stream again
            return {}
        except nats.errors.Error as error:
            raise BusError(f"cannot look at {stream}: {error}") from error
        return found.state.subjects or {}

    there = await bus.patiently(subjects, f"looking at {stream}")
    return all(f"{ref.subject}.{n}" in there for ref in refs for n in range(ref.chunks))
