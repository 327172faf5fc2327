"""Bytes of any size on a stream."""

import os
import tracemalloc

import pytest

from bus.connection import Bus
from bus.errors import BusError
from bus.messages import BlobRef
from bus.streams.blob_store import CHUNK_BYTES, delete_blob, get_blob, in_chunks, put_blob
from bus.streams.publish import Publisher
from tests.conftest import Connect


async def put(bus: Bus, data: bytes) -> BlobRef:
    return await put_blob(bus, Publisher(bus), data, 7, "snapshot")


async def chunks_stored(bus: Bus) -> int:
    return int((await bus.js.stream_info(bus.topology.stream("FILES"))).state.messages)


@pytest.mark.nats
@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * 10**6 + 1])
async def test_blob_survives_the_round_trip(bus: Bus, connect: Connect, size: int):
    data = os.urandom(size)
    ref = await put(bus, data)
    assert ref.size_bytes == size
    assert ref.chunks == max(1, -(-size // CHUNK_BYTES))
    async with connect("reader") as reader:
        assert await get_blob(reader, ref) == data


def test_content_is_copied_once_as_it_is_cut_into_chunks():
    pieces = (bytes(1 << 20) for _ in range(32))
    tracemalloc.start()
    try:
        cut = in_chunks(pieces)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert cut.size_bytes == 32 << 20
    assert peak < 1.3 * cut.size_bytes


@pytest.mark.nats
async def test_blob_of_zeros_whose_chunks_are_alike_survives(bus: Bus):
    data = bytes(4 * CHUNK_BYTES)
    assert await get_blob(bus, await put(bus, data)) == data


@pytest.mark.nats
@pytest.mark.parametrize("flip", [b"", b"short", os.urandom(CHUNK_BYTES)])
async def test_chunk_that_changed_is_noticed(bus: Bus, flip: bytes):
    ref = await put(bus, os.urandom(3 * CHUNK_BYTES))
    await bus.js.publish(f"{ref.subject}.1", flip)
    with pytest.raises(BusError, match=f"bytes do not have the digest {ref.digest}"):
        await get_blob(bus, ref)


@pytest.mark.nats
async def test_chunk_that_is_missing_is_named(bus: Bus):
    ref = await put(bus, os.urandom(3 * CHUNK_BYTES))
    await bus.js.purge_stream(bus.topology.stream("FILES"), subject=f"{ref.subject}.1")
    with pytest.raises(BusError, match="chunk 1 of 3 is not on the bus"):
        await get_blob(bus, ref)


@pytest.mark.nats
async def test_deleted_blob_frees_its_chunks_and_no_others(bus: Bus):
    kept, gone = await put(bus, b"kept"), await put(bus, os.urandom(3 * CHUNK_BYTES))
    await delete_blob(bus, gone)
    assert await chunks_stored(bus) == 1
    assert await get_blob(bus, kept) == b"kept"
    with pytest.raises(BusError, match="not on the bus"):
        await get_blob(bus, gone)
    await delete_blob(bus, gone)  # a second time is no error


@pytest.mark.nats
async def test_same_bytes_can_be_put_again_also_after_they_were_deleted(bus: Bus):
    ref = await put(bus, b"again")
    assert await put(bus, b"again") == ref
    assert await chunks_stored(bus) == 1
    await delete_blob(bus, ref)
    assert await put(bus, b"again") == ref
    assert await get_blob(bus, ref) == b"again"


@pytest.mark.nats
async def test_refused_chunk_is_one_plain_error(bus: Bus):
    await bus.js.delete_stream(bus.topology.stream("FILES"))
    config = next(c for c in bus.topology.streams(2) if c.name == bus.topology.stream("FILES"))
    await bus.js.add_stream(config.evolve(max_msg_size=1000))
    with pytest.raises(BusError, match="the stream refuses"):
        await put(bus, os.urandom(3 * CHUNK_BYTES))


@pytest.mark.nats
async def test_blob_is_not_found_when_its_stream_is_gone(bus: Bus):
    ref = await put(bus, b"x")
    await bus.js.delete_stream(bus.topology.stream("FILES"))
    with pytest.raises(BusError, match="not on the bus"):
        await get_blob(bus, ref)
    with pytest.raises(BusError, match="cannot delete"):
        await delete_blob(bus, ref)
