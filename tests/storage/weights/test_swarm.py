"""Hosts pass parts of weights on to each other, and the learner sends each part about once."""

import asyncio
import os
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import xxhash
from structlog.testing import capture_logs

from bus.errors import BusError
from bus.weight_requests import BlobAccess, PartsAsked, PartsFound
from storage.disk.host_identity import host_identity
from storage.settings.weights_transport import HttpTransport, PeerConfig
from storage.weights import blob_http, blob_parts, blob_sources, swarm
from storage.weights.blob_files import file_name, read_file
from storage.weights.blob_http import HttpBlobs, parts_subject
from storage.weights.blob_parts import BlockDigests, is_part, part_range
from storage.weights.blob_sources import Blobs
from storage.weights.swarm import Swarm
from storage.weights.tensors import HostTensor, Weights, read_snapshot, snapshot_content

pytestmark = pytest.mark.nats
TIMEOUT_S = 60
BLOCK = 50_000


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(blob_parts, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(blob_sources, "SMALL_BYTES", BLOCK)
    monkeypatch.setattr(swarm, "POLL_S", 0.02)


@pytest.fixture
async def origin(bus, tmp_path):
    store = HttpBlobs(bus, tmp_path / "origin", HttpTransport(host="127.0.0.1"))
    await store.start()
    yield store
    await store.close()


@pytest.fixture
async def host(bus):
    """Make hosts, which end with the test."""
    made = []

    def make(machine="another", **config):
        made.append(Swarm(bus, PeerConfig(**{"host": "127.0.0.1"} | config), machine=machine))
        return made[-1]

    yield make
    for one in made:
        await one.close()


def ref_of(content, **parts):
    with ThreadPoolExecutor(2) as threads:
        digests = BlockDigests(threads)
        assert b"".join(digests.passing(content)) == b"".join(content)
        return digests.ref("one", "http://127.0.0.1:1")


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 1_234_567])
def test_every_part_has_a_digest_however_the_content_is_cut(size, monkeypatch):
    monkeypatch.setattr(blob_parts, "MOST_PARTS", 7)
    data = os.urandom(size)
    cuts = sorted(random.Random(0).choices(range(size + 1), k=20))
    pieces = [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, size], strict=True)]
    ref = ref_of(pieces)
    assert ref == ref_of([data])
    assert (ref.size_bytes, ref.parts) == (size, -(-size // ref.part_bytes))
    assert ref.parts <= 7
    ranges = [part_range(ref, part) for part in range(ref.parts)]
    assert b"".join(data[begin:end] for begin, end in ranges) == data
    for part, (begin, end) in enumerate(ranges):
        assert is_part(ref, part, data[begin:end])
        assert not is_part(ref, part, data[begin : end - 1] + bytes([data[end - 1] ^ 1]))


async def test_files_of_this_machine_are_read_and_not_kept_for_others(
    origin, host, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    contents = [os.urandom(3 * BLOCK) for _ in range(3)]
    first, damaged, hidden = [await origin.put([data], n) for n, data in enumerate(contents)]
    near = host(host_identity())
    assert bytes(await near.get(first)) == contents[0]
    assert (origin.sent_bytes, near._held) == (0, {})
    (tmp_path / "origin" / file_name(damaged)).write_bytes(bytes(3 * BLOCK))
    with capture_logs() as logs, pytest.raises(BusError, match="does not have its digest"):
        await near.get(damaged)
    assert "part 0 does not have its digest" in logs[0]["reason"]
    monkeypatch.setattr(os, "access", lambda *_: False)  # they are another user's
    sent_bytes = origin.sent_bytes
    assert bytes(await host(host_identity()).get(hidden)) == contents[2]
    assert origin.sent_bytes == sent_bytes + 3 * BLOCK


async def test_an_answer_or_a_blob_that_names_no_file_is_refused(origin, host):
    ref = await origin.put([b"weights"], 1)
    origin._files.directory = Path("no\0directory")
    with pytest.raises(BusError, match="no name of a directory"):
        await host(host_identity()).get(ref)
    with pytest.raises(BusError, match="no name of a blob"):
        read_file(Path(), replace(ref, subject="no\0blob"))


async def test_eight_receivers_take_about_one_copy_from_the_learner(bus, origin, host):
    data = os.urandom(40 * BLOCK)
    ref = await origin.put([data], "one", 1)
    async with asyncio.timeout(TIMEOUT_S):
        found = await asyncio.gather(*(host().get(ref) for _ in range(8)))
        assert all(one == data for one in found)
        assert origin.sent_bytes <= 1.2 * len(data)
        late = origin.sent_bytes
        assert await host().get(ref) == data
    assert origin.sent_bytes == late, "who comes later takes all from hosts"


async def test_fetch_goes_on_by_part_where_it_was_interrupted(origin, host, tmp_path, monkeypatch):
    data = os.urandom(20 * BLOCK)
    ref = await origin.put([data], "one", 1)
    path = tmp_path / "origin" / file_name(ref)
    one, fetch, left = host(), blob_http.fetch_range, [10]

    async def some(*arguments, **named):
        left[0] -= 1
        if left[0] < 0:
            raise BusError("the network is away")
        await fetch(*arguments, **named)

    async with asyncio.timeout(TIMEOUT_S):
        with monkeypatch.context() as broken:
            broken.setattr(blob_http, "fetch_range", some)
            with pytest.raises(BusError, match="the network is away"):
                await one.get(ref)
        assert origin.sent_bytes == 10 * BLOCK
        assert await one.get(ref) == data
    assert origin.sent_bytes == len(data)
    path.unlink()
    await one.close()
    with pytest.raises(BusError, match="404"):
        await asyncio.wait_for(host(serve=False).get(ref), TIMEOUT_S)
    with pytest.raises(BusError, match="nobody is not here any more"):
        await asyncio.wait_for(host().get(replace(ref, subject="nobody")), TIMEOUT_S)


def alike_by_xxh3():
    """Two contents with one xxh3-128: where half a word equals the secret, its other half is only summed."""
    first, second = bytes.fromhex("b8fe6c39"), bytes.fromhex("7c01812c")
    between, rest = os.urandom(60), os.urandom(20 * BLOCK - 72)
    made = [
        first + n.to_bytes(4, "little") + between[4:] + second + (99 - n).to_bytes(4, "little") + rest
        for n in (5, 6)
    ]
    assert xxhash.xxh3_128_digest(made[0]) == xxhash.xxh3_128_digest(made[1])
    return made


@pytest.mark.parametrize(
    ("data", "forged"),
    [(os.urandom(20 * BLOCK), bytes(20 * BLOCK)), alike_by_xxh3()],
    ids=["other bytes", "equal xxh3"],
)
async def test_a_host_that_lies_is_named_and_avoided_and_its_part_taken_elsewhere(origin, host, data, forged):
    ref = await origin.put([data], "one", 1)
    liar = host()
    async with asyncio.timeout(TIMEOUT_S):
        (await liar.get(ref))[:] = forged
        sent = origin.sent_bytes
        with capture_logs() as logs:
            found = await asyncio.gather(*(host().get(ref) for _ in range(3)))
    assert all(one == data for one in found)
    damaged = [entry for entry in logs if entry["event"] == "host_of_weights_avoided"]
    assert {entry["url"] for entry in damaged} == {liar._url}
    assert all(entry["is_damaged"] for entry in damaged)
    assert origin.sent_bytes - sent <= 1.3 * len(data)


async def test_hosts_that_are_dead_or_say_nothing_cost_a_bounded_time(origin, host, monkeypatch):
    monkeypatch.setattr(swarm, "PEER_S", 0.5)
    data = os.urandom(20 * BLOCK)
    ref = await origin.put([data], "one", 1)
    dead, mute = host(), host()
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(dead.get(ref), mute.get(ref))
        await dead.close()
        mute._held[file_name(ref)].has = lambda begin, end: True
        mute._server._counted = lambda sent: asyncio.Event().wait()
        assert await host().get(ref) == data


def weights(changed=()):
    drawn = np.random.default_rng(0)
    tensors = {}
    for name in ("a", "b", "c", "d"):
        words = drawn.integers(0, 1 << 16, 10 * BLOCK // 2, dtype=np.uint16)
        words[7] += name in changed
        tensors[name] = HostTensor("BF16", (10, BLOCK // 2), words)
    return tensors


def written(directory, files, **tensors):
    """A model's directory with these tensors, by file."""
    directory.mkdir()
    for file, names in files.items():
        content = snapshot_content(Weights.of(0, {name: tensors[name] for name in names}))
        (directory / file).write_bytes(b"".join(content))
    return directory


async def test_first_weights_come_from_the_models_directory_as_far_as_they_agree(origin, host, tmp_path):
    model = written(tmp_path / "model", {"1.safetensors": "db", "2.safetensors": "a"}, **weights())
    content = snapshot_content(Weights.of(7, weights(changed="b")))
    first = await origin.put(content, "one", 7)
    one = host(model=model)
    async with asyncio.timeout(TIMEOUT_S):
        assert bytes(await one.get(first)) == b"".join(content)
        # what differs: all of c, which no file has, and the beginning of b; parts lie across two tensors
        assert 11 * BLOCK <= origin.sent_bytes <= 15 * BLOCK
        sent = origin.sent_bytes
        other = await origin.put([os.urandom(10 * BLOCK)], "one", 8)
        await one.get(other)
        assert origin.sent_bytes == sent + 10 * BLOCK + 8, "it is no snapshot"


async def test_a_directory_of_another_model_or_a_torn_one_costs_nothing(origin, host, tmp_path):
    content = snapshot_content(Weights.of(0, weights()))
    ref = await origin.put(content, "one", 0)
    others = written(tmp_path / "other", {"1.safetensors": "abcd"}, **weights(changed="abcd"))
    torn = written(tmp_path / "torn", {"1.safetensors": "ab"}, **weights())
    (torn / "2.safetensors").write_bytes(b"\xff" * 20)
    async with asyncio.timeout(TIMEOUT_S):
        with capture_logs() as logs:
            for directory in (others, torn, tmp_path / "none"):
                assert bytes(await host(model=directory, serve=False).get(ref)) == b"".join(content)
    unused = [entry["directory"] for entry in logs if entry["event"] == "model_directory_not_used"]
    assert unused == [str(torn), str(tmp_path / "none")]


@pytest.mark.parametrize(
    ("url", "access"),
    [
        ("https://127.0.0.1:1", BlobAccess(token="t", certificate="none")),
        (f"http://{'a' * 100}", None),
        ("http://[", None),
    ],
)
async def test_a_host_that_announces_nonsense_stops_nobody(bus, origin, host, url, access):
    data = os.urandom(5 * BLOCK)
    ref = await origin.put([data], "one", 1)
    enemy = PartsAsked(blob=ref.subject, host="enemy", url=url, access=access, have=bytes([1] * ref.parts))
    with suppress(BusError):
        await bus.request(parts_subject(bus, ref.origin), enemy, PartsFound, timeout_s=TIMEOUT_S)
    assert await asyncio.wait_for(host().get(ref), TIMEOUT_S) == data


async def test_readers_of_a_host_with_a_low_bound_go_on_reading_there(origin, host, monkeypatch):
    monkeypatch.setattr(swarm, "PEER_S", 0.5)
    monkeypatch.setattr(swarm, "SLOWEST_BYTES_PER_S", BLOCK / 20)
    data = os.urandom(6 * BLOCK)
    ref = await origin.put([data], "one", 1)
    async with asyncio.timeout(TIMEOUT_S):
        await host(bytes_per_s=2 * BLOCK).get(ref)
        sent = origin.sent_bytes
        assert await host().get(ref) == data
    assert origin.sent_bytes == sent


async def test_strangers_get_nothing_that_is_not_here_and_nothing_but_blobs(origin, host):
    ref = await origin.put([os.urandom(3 * BLOCK)], "one", 1)
    one = host()
    await asyncio.wait_for(one.get(ref), TIMEOUT_S)
    one._held[file_name(ref)].states[1] = 0
    async with aiohttp.ClientSession() as session:
        for name, asked, status in (
            (file_name(ref), f"bytes=0-{BLOCK - 1}", 206), (file_name(ref), f"bytes=0-{BLOCK}", 404),
            (file_name(ref), f"bytes={2 * BLOCK}-{3 * BLOCK - 1}", 206), ("else.blob", "bytes=0-1", 404),
        ):  # fmt: skip
            async with session.get(f"{one._url}/{name}", headers={"Range": asked}) as response:
                assert response.status == status, asked


async def test_a_bound_on_the_bandwidth_holds_for_all_readers_together(bus, tmp_path, host):
    data = os.urandom(10 * BLOCK)
    store = HttpBlobs(bus, tmp_path / "slow", HttpTransport(host="127.0.0.1", bytes_per_s=len(data)))
    await store.start()
    ref = await store.put([data], "one", 1)
    began = asyncio.get_running_loop().time()
    async with asyncio.timeout(TIMEOUT_S):
        assert await host().get(ref) == data
    assert asyncio.get_running_loop().time() - began >= 0.5
    await store.close()


async def test_weights_are_kept_a_while_for_others_only_in_bounded_memory(origin, host):
    one = host(keep_bytes=5 * BLOCK)
    refs = [await origin.put([os.urandom(3 * BLOCK)], "one", n) for n in range(3)]
    async with asyncio.timeout(TIMEOUT_S):
        for ref in refs:
            await one.get(ref)
    assert list(one._held) == [file_name(refs[2])]


async def test_what_two_read_at_a_time_is_not_forgotten_between_them(origin, host):
    data = [os.urandom(3 * BLOCK) for _ in range(2)]
    refs = [await origin.put([one], "one", n) for n, one in enumerate(data)]
    one = host()
    async with asyncio.timeout(TIMEOUT_S):
        for ref in refs:
            await one.get(ref)
        one._config, sent = PeerConfig(host="127.0.0.1", keep_bytes=0), origin.sent_bytes
        assert await asyncio.gather(one.get(refs[0]), one.get(refs[0])) == [data[0]] * 2
    assert origin.sent_bytes == sent, "the second would write where the first one's tensors are"
    assert list(one._held) == [file_name(refs[1])]


async def test_tensors_of_one_reader_stay_when_another_readers_go(origin, host):
    words = np.arange(BLOCK, dtype=np.uint32)
    weights = Weights.of(0, {"w": HostTensor("F32", (BLOCK,), words)})
    refs = [await origin.put(snapshot_content(weights), "one", n) for n in range(2)]
    one = host(keep_bytes=0)
    async with asyncio.timeout(TIMEOUT_S):
        first, second = [read_snapshot(await one.get(refs[0]), 0) for _ in range(2)]
        del first
        await one.get(refs[1])
    assert file_name(refs[0]) not in one._held
    assert np.array_equal(second.tensors["w"].words, words)


async def test_small_blobs_and_those_without_parts_come_from_the_learner_at_once(bus, origin):
    class Nobody:
        async def get(self, ref):
            raise AssertionError(ref)

    data = os.urandom(BLOCK)
    ref = await origin.put([data], "one", 1)
    assert await Blobs(bus, Nobody()).get(ref) == data
