"""Stores bytes of any size on a stream as numbered chunks, and fetches them in parallel by direct get.

The JetStream object store is not used: its `get` is quadratic in nats-py."""

import asyncio
import uuid
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import nats.errors
import structlog

from bus.blobs import blocks_of, checked, sha256_of
from bus.connection import Bus
from bus.errors import BusError, DamagedError
from bus.messages import BlobRef
from bus.process.work_progress import Advance, long_work, uncounted
from bus.streams.publish import Publisher, together

log = structlog.get_logger()
CHUNK_BYTES = 512 << 10
LARGE_BYTES = 64 << 20
"""Size from which it is shown how far the fetch of a blob is."""
FETCH_WINDOW = 16
"""Chunks asked for at once: enough to fill the connection, few enough to bound memory."""


class Chunks(NamedTuple):
    """Bytes as they lie on a stream."""

    chunks: list[bytes]
    size_bytes: int
    digest: str


def in_chunks(content: Iterable[bytes | memoryview]) -> Chunks:
    """Cut content into chunks, which are its only copy, and take its digest."""
    chunks = [b"".join(block) for block in blocks_of(content, CHUNK_BYTES)]
    return Chunks(chunks or [b""], sum(map(len, chunks)), sha256_of(chunks).hex())


async def put_blob(
    bus: Bus, publisher: Publisher, data: bytes, *tokens: object, stream: str = "files"
) -> BlobRef:
    """Store `data` on FILES, or on WEIGHTS by `stream = "weights"`, under the subject made of `tokens`.
    Returns the reference that finds it. Raises `BusError` when the stream refuses a chunk."""
    return await put_chunks(
        bus, publisher, await asyncio.to_thread(in_chunks, [data]), *tokens, stream=stream
    )


async def put_chunks(bus: Bus, publisher: Publisher, cut: Chunks, *tokens: object, stream: str) -> BlobRef:
    """Do what `put_blob` does with bytes that are cut already."""
    subject = bus.subject(stream, *tokens, cut.digest[:12])
    put = uuid.uuid4().hex  # not from the content: bytes deleted a minute ago would be a duplicate

    async def store(n: int, chunk: bytes) -> None:
        await publisher.publish(f"{subject}.{n}", chunk, message_id=f"{put}.{n}")

    await together(store(n, chunk) for n, chunk in enumerate(cut.chunks))
    return BlobRef(subject=subject, chunks=len(cut.chunks), size_bytes=cut.size_bytes, digest=cut.digest)


async def put_only_blob(bus: Bus, publisher: Publisher, data: bytes, token: str) -> BlobRef:
    """Store `data` on FILES as the only blob under `token`: chunks of others that lie there are emptied then.
    A purge would remove them, but who may purge FILES may remove all that others keep there, too."""
    ref = await put_blob(bus, publisher, data, token)
    stream, prefix = bus.topology.stream("FILES"), bus.subject("files", token)
    try:
        found = await bus.js.stream_info(stream, subjects_filter=f"{prefix}.>")
        for subject in found.state.subjects or {}:
            if not subject.startswith(f"{ref.subject}."):
                await publisher.publish(subject, b"", message_id=uuid.uuid4().hex)
    except (nats.errors.Error, BusError) as error:  # the blobs go when the next one is stored
        log.warning("old_files_not_removed", files=prefix, reason=str(error))
    return ref


async def get_blob(bus: Bus, ref: BlobRef) -> bytes:
    """Fetch the bytes behind `ref`. Raises `BusError` when a chunk is gone or the digest differs twice."""
    try:
        return await _get_blob(bus, ref)
    except DamagedError as error:  # perhaps on the way only
        log.warning("blob_fetched_again", subject=ref.subject, reason=str(error))
        return await _get_blob(bus, ref)


async def _get_blob(bus: Bus, ref: BlobRef) -> bytes:
    stream = stream_with(bus, ref)
    slots = asyncio.Semaphore(FETCH_WINDOW)

    async def fetch(n: int) -> bytes:
        async with slots:
            found = await bus.patiently(lambda: chunk(n), f"fetching {ref.subject}")
        advance(len(found))
        return found

    async def chunk(n: int) -> bytes:
        try:
            found = await bus.js.get_last_msg(stream, f"{ref.subject}.{n}", direct=True)
        except nats.errors.Error as error:
            # no responders means that there is no such stream: waiting would not bring it back
            cause = None if isinstance(error, nats.errors.NoRespondersError) else error
            raise BusError(f"{ref.subject}: chunk {n} of {ref.chunks} is not on the bus ({error})") from cause
        return found.data or b""

    with shown_fetch(ref) as advance:
        chunks = await together(fetch(n) for n in range(ref.chunks))
    if ref.size_bytes and not any(chunks):  # `put_only_blob` has emptied them
        raise BusError(f"{ref.subject} is not on the bus any more: another blob took its place")
    return await asyncio.to_thread(lambda: checked(ref, b"".join(chunks)))


def shown_fetch(ref: BlobRef) -> AbstractContextManager[Advance]:
    """Show how many bytes of a large blob are fetched inside; yields what they are counted by."""
    if ref.size_bytes < LARGE_BYTES:
        return nullcontext(uncounted)
    return long_work(f"fetching {ref.subject}", ref.size_bytes)


def stream_with(bus: Bus, ref: BlobRef) -> str:
    """Return the stream that a blob lies on. Raises `BusError` for a name that no blob of this run has."""
    for stream in ("FILES", "WEIGHTS"):
        if ref.subject.startswith(f"{bus.subject(stream.lower())}."):
            return bus.topology.stream(stream)
    raise BusError(f"{ref.subject!r} is no name of a blob of run {bus.topology.run!r}")


async def delete_blob(bus: Bus, ref: BlobRef) -> None:
    try:
        await bus.js.purge_stream(stream_with(bus, ref), subject=f"{ref.subject}.*")
    except nats.errors.Error as error:
        raise BusError(f"{ref.subject}: cannot delete it from the bus ({error})") from error
