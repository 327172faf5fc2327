"""Reading a shard's own files on its host; whatever is wrong with them, the bus brings the same."""

import asyncio
import shutil
import threading
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from bus.codec import Message, decode, encode
from bus.connection import answers
from bus.errors import BusError, UnreadableGroupsError
from bus.requests import Done, GroupRef, Located, LocateRequest, ReadRequest
from bus.trajectory import Trajectory, TrajectoryBatch
from storage.client import reader as reader_module
from storage.client.reader import LocalReader, ReplayReader
from storage.disk import host_identity
from storage.store import addresses, layout
from storage.store.replay import ReplayStore
from storage.store.segments import FILE
from storage.store.zip_files import zipped
from tests.factories import make_trajectory
from tests.storage.serving import make_shard, running, until

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]


@pytest.fixture
def store(tmp_path):
    """Six groups in six segments."""
    with closing(ReplayStore.open(tmp_path / "replay")) as opened:
        for lease_id in range(0, 12, 2):
            opened.append(group(lease_id))
        yield opened


def group(lease_id: int, tokens: int = 8) -> list[Trajectory]:
    return [make_trajectory(lease_id, sample, tokens=tokens) for sample in range(2)]


def refs(*lease_ids: int) -> list[GroupRef]:
    return [GroupRef(lease_id=lease_id, shard=0) for lease_id in lease_ids]


def as_bytes(groups) -> list[list[bytes]]:
    return [[encode(t) for t in siblings] for siblings in groups]


def open_files(below: Path) -> int:
    """Count this process's open files below a directory; what other tests have left open comes and goes."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            found += link.readlink().is_relative_to(below)
    return found


@asynccontextmanager
async def shard_at_work(bus, store):
    async with running(make_shard(bus, store, 0).run):
        await until(lambda: locates(bus))
        yield


async def locates(bus) -> bool:
    request = LocateRequest(lease_ids=(), host="")
    try:
        await bus.request(bus.subject("rpc", "locate", 0), request, Located, timeout_s=20)
    except BusError:
        return False
    return True


@asynccontextmanager
async def fetching(bus, store):
    """A reader beside the shard."""
    async with shard_at_work(bus, store):
        with closing(ReplayReader(bus, "a")) as reader:
            yield reader


async def fetched(reader: ReplayReader, *lease_ids: int) -> list[list[bytes]]:
    return as_bytes(await reader.fetch(refs(*lease_ids)))


async def test_reader_on_the_shards_host_maps_its_files(bus, store):
    async with fetching(bus, store) as reader:
        assert await fetched(reader, 10, 0, 4) == as_bytes(map(group, (10, 0, 4)))
        assert reader.read == {"mapped": 6, "mapped_bytes": 6 * 8 * (4 + 4 + 4 + 1)}


async def test_reader_on_another_host_gets_the_same_over_the_bus(bus, store, monkeypatch):
    monkeypatch.setattr(reader_module, "host_identity", lambda: "another")
    async with fetching(bus, store) as reader:
        assert await fetched(reader, 10, 0, 4) == as_bytes(map(group, (10, 0, 4)))
        assert (reader.read["mapped"], reader.read["bus"]) == (0, 6)


async def test_host_without_an_identity_never_takes_another_for_itself(bus, store, monkeypatch, tmp_path):
    monkeypatch.setattr(host_identity, "BOOT_ID", tmp_path / "missing")
    async with fetching(bus, store) as reader:
        await fetched(reader, 0)
        assert (reader.read["mapped"], reader.read["bus"]) == (0, 2)


async def test_long_answers_are_decoded_beside_the_event_loop(bus, store, monkeypatch):
    store.append([make_trajectory(12, sample, tokens=20_000) for sample in range(2)])
    threads: list[tuple[bool, int]] = []

    def recording(data, *expected):
        threads.append((threading.current_thread() is threading.main_thread(), len(data)))
        return decode(data, *expected)

    async with shard_at_work(bus, store):
        monkeypatch.setattr(answers, "decode", recording)
        [found] = await ReplayReader(bus, "a", read="bus").fetch(refs(12))
    assert [len(t.token_ids) for t in found] == [20_000, 20_000]
    assert max(size for in_loop, size in threads if in_loop) < answers.THREAD_BYTES
    assert max(size for in_loop, size in threads if not in_loop) > 20_000 * 13


async def test_bus_can_be_chosen(bus, store):
    async with shard_at_work(bus, store):
        reader = ReplayReader(bus, "a", read="bus")
        assert await fetched(reader, 2) == as_bytes([group(2)])
        reader.close()
        assert reader.read["bus"] == 2


async def test_segments_merged_since_they_were_located_are_located_again(bus, store, monkeypatch):
    monkeypatch.setattr(layout, "MERGE_SEGMENTS", 2)

    class Slow(LocalReader):
        answers = 0

        async def _locate(self, shard, lease_ids):
            where = await super()._locate(shard, lease_ids)
            self.answers += 1
            if self.answers == 1:
                await asyncio.to_thread(store.compact)
            return where

    async with shard_at_work(bus, store):
        with closing(Slow(bus)) as reader:
            found = await reader.read(0, [4, 0, 2])
    assert found is not None
    assert as_bytes([found]) == as_bytes([[t for lease_id in (4, 0, 2) for t in group(lease_id)]])
    assert reader.answers == 2


async def test_directory_that_is_another_one_here_is_not_read_and_said_once(bus, store, monkeypatch):
    """As when two hosts, or two containers, have something different under the same path."""
    monkeypatch.setattr(addresses, "directory_identity", lambda directory: (0, 0))
    async with fetching(bus, store) as reader:
        with capture_logs() as logs:
            for _ in range(3):
                assert await fetched(reader, 0) == as_bytes([group(0)])
        assert (reader.read["mapped"], reader.read["bus"]) == (0, 6)
    assert [line["event"] for line in logs].count("replay_not_mapped") == 1


async def test_files_that_cannot_be_read_here_come_over_the_bus(bus, store):
    async with fetching(bus, store) as reader:
        store.read([0])  # the shard has them mapped
        (store.directory / "segment_00000000").rename(store.directory / ".hidden")
        assert await fetched(reader, 0) == as_bytes([group(0)])
        assert await fetched(reader, 2) == as_bytes([group(2)])
        assert (reader.read["mapped"], reader.read["bus"]) == (2, 2)


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"odd",
        b"".join(zipped({"zarr.json": [b"{}"]})),
        b"".join(zipped({"zarr.json": [b'{"attributes": {"sluice_replay": 4}}']})),
    ],
    ids=["empty", "no zip", "no attributes", "no fields"],
)
async def test_torn_segment_is_left_to_the_shard(bus, store, content):
    (store.directory / "segment_00000000" / FILE).write_bytes(content)
    async with shard_at_work(bus, store):
        with closing(LocalReader(bus)) as reader, capture_logs() as logs:
            assert await reader.read(0, [0]) is None
            assert await reader.read(0, [2]) is not None
    [line] = [line for line in logs if line["event"] == "replay_not_mapped"]
    assert "segment_00000000" in line["reason"]


async def test_flipped_bit_is_never_trained_on(bus, store):
    async with fetching(bus, store) as reader:
        path = store.directory / "segment_00000000" / FILE
        content = bytearray(path.read_bytes())
        content[content.index(group(0)[0].token_ids.tobytes()) + 1] ^= 1
        path.write_bytes(content)
        with pytest.raises(UnreadableGroupsError, match="segment_00000000 is corrupt") as caught:
            await reader.fetch(refs(0, 2))
        assert caught.value.lease_ids == (0,)
        assert not reader.read


async def test_segment_under_the_name_of_an_earlier_one_is_not_taken_for_it(bus, tmp_path):
    with closing(LocalReader(bus)) as reader:
        for tokens in (8, 12):
            with closing(ReplayStore.open(tmp_path / "replay")) as store:
                store.append(group(0, tokens))
                async with shard_at_work(bus, store):
                    found = await reader.read(0, [0])
            assert found is not None
            assert as_bytes([found]) == as_bytes([group(0, tokens)])
            store.directory.rename(tmp_path / f"away-{tokens}")


async def test_addresses_that_lead_out_of_the_directory_are_not_followed(bus, store):
    async with shard_at_work(bus, store):
        with closing(LocalReader(bus)) as reader:
            where = await reader._locate(0, [0])

            async def elsewhere(request: LocateRequest) -> list[Located]:
                fields = {name: getattr(where, name) for name in Located.__slots__}
                return [Located(**fields | {"segments": ("../replay/segment_00000002",)})]

            await bus.serve(bus.subject("rpc", "locate", 1), LocateRequest, elsewhere)
            assert await reader.read(1, [0]) is None  # it holds the group of lease 4


@pytest.mark.nightly
@pytest.mark.slow
async def test_thousands_of_steps_leave_no_file_open(bus, store, monkeypatch, tmp_path):
    monkeypatch.setattr(reader_module, "MAPPED_SEGMENTS", 3)
    async with shard_at_work(bus, store):
        reader = LocalReader(bus)
        store.read(range(0, 12, 2))
        before = open_files(tmp_path)
        where = await reader._locate(0, list(range(0, 12, 2)))
        kept = []
        for step in range(2000):
            kept = [*kept[-3:], reader._read_mapped(where, set(range(0, 12, 2)))]
            if step % 500 == 0:
                assert open_files(tmp_path) == before + 3
        reader.close()
        assert open_files(tmp_path) == before
        assert as_bytes([kept[0]]) == as_bytes([[t for n in range(0, 12, 2) for t in group(n)]])


def test_directory_identity_of_what_is_missing_is_an_error(tmp_path: Path):
    with pytest.raises(addresses.StorageError, match="cannot be read here"):
        addresses.directory_identity(tmp_path / "missing")


@pytest.mark.first(2, others=pytest.mark.slow)
@pytest.mark.parametrize("answered", [[2], [0, 0], [2, 0], [0]], ids=str)
async def test_groups_that_nobody_asked_for_are_not_trained_on(bus, store, monkeypatch, answered):
    async def other_groups(request: ReadRequest) -> list[Message]:
        found = [trajectory for lease_id in answered for trajectory in group(lease_id)]
        return [TrajectoryBatch.of(found), Done()]

    monkeypatch.setattr(reader_module, "REFUSAL_LIMIT_S", 0.0)
    await bus.serve(bus.subject("rpc", "read", 0), ReadRequest, other_groups)
    with pytest.raises(BusError, match=r"shard 0 was asked for groups \[0, 2\] and answers others"):
        await ReplayReader(bus, "a", read="bus").fetch(refs(0, 2))


async def test_a_segment_put_under_another_number_is_neither_mapped_nor_sent(bus, store):
    names = [store.directory / entry.name for entry in store.entries]
    store.close()
    for one, other in ((0, 5), (3, 1)):
        shutil.copyfile(names[one] / FILE, names[other] / FILE)
    with closing(ReplayStore.open(store.directory)) as reopened:
        async with fetching(bus, reopened) as reader:
            assert await fetched(reader, 0, 6) == as_bytes(map(group, (0, 6)))
            with pytest.raises(UnreadableGroupsError, match="segment_00000005 holds g00000000"):
                await reader.fetch(refs(10))
