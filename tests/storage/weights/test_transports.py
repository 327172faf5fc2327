"""Every way that published weights take: what arrives is what was put, or it is refused."""

import os
import platform
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import aiohttp
import aiohttp.web
import numpy as np
import pytest
import xxhash
from pydantic import ValidationError

from bus.codec import decode, encode
from bus.errors import BusError, ConfigError
from bus.messages import BlobRef
from bus.server.nats_server import free_port
from bus.topology import MIB
from learner.config.learner import LearnerConfig
from learner.config.parallel import WorldConfig
from learner.config.publication import PublicationConfig
from storage.settings.weights_transport import (
    TRANSPORTS,
    AutoTransport,
    BusTransport,
    FilesTransport,
    HttpTransport,
    Transport,
)
from storage.weights import blob_http, blob_parts
from storage.weights.blob_files import FileBlobs, file_name, read_file
from storage.weights.blob_http import HttpBlobs
from storage.weights.blob_sources import Blobs
from storage.weights.blob_stores import blob_store, chosen_transport
from tests.storage.serving import refusing_disk

pytestmark = pytest.mark.nats
TIMEOUT_S = 60


def http(**settings):
    return HttpTransport(**{"host": "127.0.0.1"} | settings)


def config(kind, tmp_path):
    return {"bus": BusTransport(), "http": http(), "files": FilesTransport(directory=tmp_path / "shared")}[
        kind
    ]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(blob_parts, "BLOCK_BYTES", 100_000)


@pytest.fixture(params=["bus", "http", "files"])
async def store(request, bus, tmp_path):
    store = blob_store(bus, config(request.param, tmp_path), tmp_path / "served")
    await store.start()
    yield store
    await store.close()


@pytest.fixture
async def origin(bus, tmp_path):
    """A learner that serves over HTTP."""
    store = HttpBlobs(bus, tmp_path / "origin", http())
    await store.start()
    yield store
    await store.close()


def damage(directory: Path, ref):
    path = directory / file_name(ref)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("size", [0, 1, 100_000, 1_234_567])
async def test_what_is_put_arrives(bus, store, size):
    data = os.urandom(size)
    ref = await store.put([data], "one", 7, "delta")
    assert await Blobs(bus).get(ref) == data
    assert await store.holds([ref])


@pytest.mark.parametrize("block_bytes", [7, 1000])
async def test_what_is_put_in_pieces_arrives_whole(bus, store, block_bytes, monkeypatch):
    monkeypatch.setattr(blob_parts, "BLOCK_BYTES", block_bytes)
    words = np.arange(1000, dtype=np.uint16)
    ref = await store.put([b"begin", words.data, words[:0].data, b"", words[::-1].copy().data], "one", 7)
    assert await Blobs(bus).get(ref) == b"begin" + words.tobytes() + words[::-1].tobytes()
    assert await store.holds([ref])


async def test_a_file_that_is_cut_while_it_is_read_is_refused(tmp_path, monkeypatch):
    store, read = FileBlobs(tmp_path), os.preadv
    monkeypatch.setattr(blob_parts, "BLOCK_BYTES", 300)
    await store.start()
    ref = await store.put([os.urandom(1000)], "one", 1)

    def cut_before(descriptor, buffers, offset):
        os.truncate(tmp_path / file_name(ref), 500)
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", cut_before)
    with pytest.raises(BusError, match=r"cannot read .*: it has 500 bytes, not 1000"):
        read_file(tmp_path, ref)


async def test_a_disk_that_is_full_is_named_and_nothing_is_left_there(tmp_path):
    store = FileBlobs(tmp_path)
    await store.start()
    with refusing_disk(), pytest.raises(BusError, match=f"cannot write in {tmp_path}: File too large"):
        await store.put([b"x"], "one", 1)
    assert list(tmp_path.iterdir()) == []


async def test_what_is_deleted_is_gone_and_the_others_stay(bus, store):
    kept, gone = await store.put([b"kept"], "one", 1), await store.put([b"gone"], "one", 2)
    await store.delete(gone)
    await store.delete(gone)
    assert await store.holds([kept])
    assert not await store.holds([kept, gone])
    assert await Blobs(bus).get(kept) == b"kept"
    with pytest.raises(BusError):
        await Blobs(bus).get(gone)


async def test_a_new_learner_forgets_what_the_one_before_left(bus, store):
    old = await store.put([b"old"], "one", 1)
    await store.close()
    await store.start()
    assert not await store.holds([old])


@pytest.mark.parametrize("kind", ["http", "files"])
async def test_a_flipped_bit_in_a_file_is_found(bus, tmp_path, kind):
    store = blob_store(bus, config(kind, tmp_path), tmp_path / "served")
    await store.start()
    ref = await store.put([os.urandom(300_000)], "one", 1)
    damage(tmp_path / ("served" if kind == "http" else "shared/test"), ref)
    with pytest.raises(BusError, match="part 1 does not have its digest"):
        await Blobs(bus).get(ref)
    await store.close()


@pytest.mark.parametrize("kind", ["http", "files"])
async def test_a_torn_file_is_found(bus, tmp_path, kind):
    store = blob_store(bus, config(kind, tmp_path), tmp_path / "served")
    await store.start()
    ref = await store.put([os.urandom(300_000)], "one", 1)
    path = tmp_path / ("served" if kind == "http" else "shared/test") / file_name(ref)
    os.truncate(path, 250_000)
    assert not await store.holds([ref])
    with pytest.raises(BusError, match="bytes"):
        await Blobs(bus).get(ref)
    await store.close()


async def test_a_large_blob_travels_in_ranges_and_a_server_without_them_is_refused(
    bus, origin, tmp_path, monkeypatch
):
    data = os.urandom(250_001)
    ref = await origin.put([data], "one", 1)
    asked = []

    async def answer(request):
        asked.append(request.headers["Range"])
        return aiohttp.web.Response(body=data)

    assert await Blobs(bus).get(ref) == data
    app = aiohttp.web.Application()
    app.router.add_get("/{name}", answer)
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
    with pytest.raises(BusError, match="status 200"):
        await blob_http.download(f"http://127.0.0.1:{runner.addresses[0][1]}", ref)
    await runner.cleanup()
    assert set(asked) <= {"bytes=0-99999", "bytes=100000-199999", "bytes=200000-250000"}
    assert asked


async def test_the_server_shows_blobs_and_nothing_else(origin, tmp_path):
    (tmp_path / "secret.blob").write_text("secret")
    (tmp_path / "origin" / "notes.txt").write_text("notes")
    ref = await origin.put([b"shown"], "one", 1)
    async with aiohttp.ClientSession() as session:
        for name, status in (
            (file_name(ref), 200), ("notes.txt", 404), ("..%2fsecret.blob", 404), ("%2e%2e/secret.blob", 404),
            (".tmp-x.blob", 404), ("", 404), ("missing.blob", 404),
        ):  # fmt: skip
            async with session.get(f"{ref.origin}/{name}") as response:
                assert response.status == status, name


async def test_a_port_that_is_taken_is_named_with_the_remedy(bus, tmp_path):
    port = free_port("127.0.0.1")
    first = HttpBlobs(bus, tmp_path / "a", http(port=port))
    await first.start()
    with pytest.raises(ConfigError, match=rf"127.0.0.1:{port} .*set learner.publication.transport.port"):
        await HttpBlobs(bus, tmp_path / "b", http(port=port)).start()
    await first.close()


@pytest.mark.parametrize("kind", ["http", "files"])
async def test_a_directory_that_cannot_be_written_is_named_with_the_remedy(bus, tmp_path, kind):
    (tmp_path / "file").write_text("no directory")
    where = tmp_path / "file" / "weights"
    transport = http(serve_from=where) if kind == "http" else FilesTransport(directory=where)
    with pytest.raises(ConfigError, match=r"weights cannot lie in .*set learner.publication.transport."):
        await blob_store(bus, transport, tmp_path).start()


async def test_a_blob_of_an_unknown_transport_is_refused(bus, origin):
    ref = await origin.put([b"x"], "one", 1)
    with pytest.raises(BusError, match="knows no transport 'ftp'"):
        await Blobs(bus).get(replace(ref, origin="ftp://host"))


async def test_a_reference_of_a_build_whose_digests_anybody_could_forge_is_refused(bus, store):
    data = os.urandom(1000)
    ref = await store.put([data], "one", 1)
    old = replace(ref, part_sha256=b"", digest=xxhash.xxh3_128_hexdigest(data))
    assert decode(encode(old), BlobRef) == old, "an announcement of an earlier build ends nobody"
    with pytest.raises(BusError, match=r"without SHA-256 digests|do not have the digest"):
        await Blobs(bus).get(old)


class BucketTransport(Transport):
    """A transport that somebody adds."""

    type: str = "bucket"
    opened_by: ClassVar[str] = f"{__name__}:bucket"
    fetched_by: ClassVar[str] = f"{__name__}:from_bucket"
    schemes: ClassVar[tuple[str, ...]] = ("bucket",)


def bucket(bus, config, directory, rank):
    return FileBlobs(directory, f"{config.type}://{directory}")


async def from_bucket(_bus, ref):
    return read_file(Path(ref.origin.removeprefix("bucket://")), ref)


async def test_a_transport_that_is_added_states_all_that_others_go_by(bus, tmp_path, monkeypatch):
    monkeypatch.setitem(TRANSPORTS, "bucket", BucketTransport)
    store = blob_store(bus, await chosen_transport(bus, BucketTransport(), 1 << 50), tmp_path)
    await store.start()
    ref = await store.put([b"some", b"thing"], "policy", 7)
    assert bytes(await Blobs(bus).get(ref)) == b"something"


@pytest.mark.parametrize("kind", ["http", "files"])
async def test_a_rank_serves_what_it_stored_and_rank_0_removes_what_an_earlier_learner_left(
    bus, tmp_path, kind
):
    transport = config(kind, tmp_path)
    stores = [blob_store(bus, transport, tmp_path / "served", rank) for rank in (2, 0)]
    for store in stores:
        await store.start()
    refs = [await store.put([b"of ", bytes([n])], "policy", 7) for n, store in enumerate(stores)]
    assert len({ref.origin for ref in refs}) == 2
    assert [bytes(await Blobs(bus).get(ref)) for ref in refs] == [b"of \0", b"of \1"]
    for store in stores:
        await store.close()
    await blob_store(bus, transport, tmp_path / "served").start()
    assert not await stores[0].holds(refs[:1])


def test_a_rank_has_a_port_of_its_own():
    given = HttpTransport(port=7000, advertise="https://head:443")
    assert (given.of_rank(0), given.of_rank(3).port) == (given, 7003)
    assert given.of_rank(3).advertise == "https://head:446"
    assert HttpTransport().of_rank(3) == HttpTransport()


async def test_ranks_on_several_hosts_are_reached_by_the_names_of_these(bus, tmp_path):
    transport = HttpTransport(advertise="http://{host}.example:9000").of_rank(2)
    store = HttpBlobs(bus, tmp_path / "served", transport)
    await store.start()
    assert (await store.put([b"a"], "policy")).origin == f"http://{platform.node()}.example:9002"
    await store.close()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"advertise": "https://head"}, "advertise=https://head: .*end it with the port"),
        ({"advertise": "https://head:no"}, "advertise=https://head:no: .*end it with the port"),
        ({"advertise": "https://head:65530"}, "advertise=https://head:65530: .*at most 65535"),
        ({"port": 65530}, "port=65530: .* 65537 for the last one"),
    ],
)
def test_a_port_that_the_last_rank_cannot_have_is_refused_before_anything_starts(given, named):
    for transport in (HttpTransport(**given), AutoTransport(**given)):
        publication = PublicationConfig(transport=transport)
        LearnerConfig(publication=publication)
        with pytest.raises(ValidationError, match=named):
            LearnerConfig(publication=publication, world=WorldConfig(processes=4, nodes=2))


async def test_auto_takes_the_bus_up_to_a_fourth_of_the_stream_and_http_beyond(bus):
    found = AutoTransport(port=7000, serve_from=Path("fast"))
    fourth = 2048 * MIB // 4
    assert await chosen_transport(bus, found, fourth) == BusTransport()
    assert await chosen_transport(bus, found, fourth + 1) == HttpTransport(port=7000, serve_from=Path("fast"))


async def test_auto_goes_by_the_bytes_that_an_operator_has_given_the_stream(bus):
    stream = bus.topology.stream("WEIGHTS")
    config = (await bus.js.stream_info(stream)).config
    await bus.js.update_stream(config.evolve(max_bytes=400))
    assert await chosen_transport(bus, AutoTransport(), 101) == HttpTransport()
    await bus.js.update_stream(config.evolve(max_bytes=-1))
    assert await chosen_transport(bus, AutoTransport(), 1 << 50) == BusTransport()


async def test_what_is_named_is_never_chosen_otherwise(bus, tmp_path):
    for named in (BusTransport(), http(), FilesTransport(directory=tmp_path)):
        assert await chosen_transport(bus, named, 1 << 50) == named
