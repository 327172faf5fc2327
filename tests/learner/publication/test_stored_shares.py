"""Each rank stores and serves what it has of a version; a version is announced when all of them have."""

import asyncio
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from actors.other_policies.opponent_weights import manifest_at
from actors.weights.received import Receiver
from bus.config import BusConfig
from bus.connection import Bus
from bus.errors import BusError, WorldError
from bus.messages import BlobRef, PolicyManifest
from bus.server.nats_server import NatsServer
from learner.backends.contract.backend import NO_TENSORS, Exported, ExportedPiece
from learner.config.learner import LearnerConfig
from learner.config.model import ModelConfig
from learner.config.publication import PublicationConfig
from learner.host_memory.copies import host_tensors
from learner.publication.announcement import blobs_of
from learner.publication.publisher import WeightPublisher
from learner.world.channel import Channel
from learner.world.rank import Rank
from learner.world.world import World
from storage.model_files.weight_files import weight_files
from storage.settings.weights_transport import HttpTransport
from storage.weights.blob_files import file_name
from storage.weights.blob_http import HttpBlobs
from storage.weights.blob_sources import Blobs
from storage.weights.blob_stores import BlobStore, blob_store
from storage.weights.tensors import Weights
from tests.learner.mini_run import MiniRun

ROWS, COLUMNS = 12, 500
NAMES = ("a", "b", "c", "d", "e", "f")
VERSIONS = 6
LOST_AT = 2
"""Version during whose publication a rank is killed, or whose snapshot is overtaken."""
KEPT_AT = 1
"""Version that stays."""
FORMAT = torch.bfloat16


def whole_at(version: int) -> dict[str, torch.Tensor]:
    """Return all tensors of a version, which differs from the one before in a row of each."""
    found = {}
    for number, name in enumerate(NAMES):
        found[name] = torch.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS).float() + number
        for earlier in range(1, version + 1):
            found[name][(earlier + number) % ROWS] += 7 * earlier
    return found


def expected_at(version: int) -> Weights:
    return Weights.of(version, host_tensors({n: t.to(FORMAT) for n, t in whole_at(version).items()}))


class SharingRank(Rank):
    """A rank that trains every so many-th row of each tensor."""

    async def become(self, version: int) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mine = [tensor[rank::ranks] for tensor in whole_at(version).values()]
        self._backend.rows.copy_(torch.cat(mine))

    async def become_random(self) -> None:
        """Have weights of which a delta would take as much as all of them."""
        torch.manual_seed(dist.get_rank())
        self._backend.rows.normal_()

    async def served_bytes(self) -> None:
        """Write how much this rank's server has sent."""
        (self._settings.export.parent / f"sent-{dist.get_rank()}").write_text(str(self.store.sent_bytes))


@asynccontextmanager
async def sharing_rank(directory: Path) -> AsyncIterator[SharingRank]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    starts = torch.arange(rank, ROWS, ranks).repeat(len(NAMES)) * COLUMNS
    numbers = torch.arange(len(NAMES)).repeat_interleave(len(starts) // len(NAMES))
    rows = torch.zeros(len(starts), COLUMNS)
    piece = ExportedPiece(rows, torch.float32, NAMES, numbers, starts)
    exported = Exported(dict.fromkeys(NAMES, (ROWS, COLUMNS)), {}, NO_TENSORS, pieces=[piece])
    group = SimpleNamespace(rank=dist.get_rank, size=dist.get_world_size)
    backend = SimpleNamespace(
        hf_config=None, data_parallel_group=group, size_bytes=0, exported=lambda: exported, rows=rows,
        adapters=None,
    )  # fmt: skip
    publication = PublicationConfig(threads=1, snapshot_every=2, keep=2, keep_versions=(KEPT_AT,))
    settings = MiniRun(None, directory, None, directory / "none").settings()
    settings = replace(
        settings, model=ModelConfig(dtype="bfloat16"), export=directory / "export",
        learner=LearnerConfig(publication=publication),
    )  # fmt: skip
    with ThreadPoolExecutor(1) as thread:
        yield SharingRank(backend, settings, reader=None, demonstrations=None, thread=thread)


class KilledStore:
    """Ends this process with a version's bytes stored, before rank 0 hears of it."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self.start, self.holds, self.delete, self.close = store.start, store.holds, store.delete, store.close

    async def put(self, content: object, *tokens: object) -> BlobRef:
        blob = await self._store.put(content, *tokens)
        if tokens[1] == LOST_AT:
            os._exit(9)
        return blob


class HeldStore(KilledStore):
    """Lets the first snapshot beside deltas wait for the version that overtakes it."""

    def __init__(self, store: BlobStore) -> None:
        super().__init__(store)
        self.waits, self.overtaken = asyncio.Event(), asyncio.Event()

    async def put(self, content: object, *tokens: object) -> BlobRef:
        if tokens[1:] == (LOST_AT, "snapshot"):
            self.waits.set()
            await self.overtaken.wait()
        return await self._store.put(content, *tokens)


class Told(NamedTuple):
    manifest: PolicyManifest
    files: set[str]
    needed: set[str]


class FullStore(KilledStore):
    """Has no room for one snapshot beside deltas."""

    async def put(self, content: object, *tokens: object) -> BlobRef:
        if tokens[1:] == (LOST_AT, "snapshot"):
            raise BusError("no space left on this rank's device")
        return await self._store.put(content, *tokens)


def publish(
    url: str, directory: Path, lost: int | None = None, *, overtakes: bool = False, first: int = 0
) -> Told | None:
    return asyncio.run(_publish(url, directory, lost, overtakes, first))


async def _publish(url: str, directory: Path, lost: int | None, overtakes: bool, first: int) -> Told | None:
    number, stop = dist.get_rank(), asyncio.Event()
    async with (
        Bus.connect(BusConfig(url=url), "test", name=f"rank {number}") as bus,
        sharing_rank(directory) as rank,
    ):
        world = World(Channel(stop), rank, rank._settings)
        store = rank.store = blob_store(bus, HttpTransport(), directory / "weights", number)
        assert isinstance(store, HttpBlobs)
        if number > 0:
            kind = KilledStore if number == lost else FullStore
            async with rank.publishing_to(kind(store) if number in (lost, 2) else store):
                await world.follow()
            return None
        others = rank.other_ranks(lambda wish: world.send(Rank.fulfil, wish))
        others._read = refuse_to_read
        holding = HeldStore(store)
        publisher = WeightPublisher(
            bus,
            holding if overtakes else store,
            rank._settings.learner.publication,
            incarnation="one",
            kept=directory / "kept",
            others=others,
        )
        await publisher.start(directory)
        try:
            async with world.led(stop):
                if overtakes:
                    told = await _overtake(world, publisher, directory, holding)
                else:
                    told = await _publish_all(bus, world, publisher, directory, first)
        except* WorldError:
            if lost is None:
                raise
            (directory / "outcome").write_text(f"announced {publisher.latest.policy_version}")
            os._exit(0)  # what waits for the lost rank does so for as long as gloo allows
        await publisher.close()
        return told


def refuse_to_read(*_: object) -> None:
    raise AssertionError("rank 0 fetches a tensor")


async def _publish_all(
    bus: Bus, world: World, publisher: WeightPublisher, directory: Path, first: int
) -> Told:
    receiver = Receiver(Blobs(bus))
    for version in range(first, VERSIONS):
        await world.call(SharingRank.become, version)
        manifest = await _publish_one(world, publisher, version)
        await publisher.snapshots_written()
        assert (await receiver.advance(manifest)).digest() == expected_at(version).digest()
        fresh = await Receiver(Blobs(bus)).from_snapshot(publisher.latest)
        assert fresh.digest() == expected_at(version).digest()
    stays = await Receiver(Blobs(bus)).from_snapshot(manifest_at(publisher.latest, KEPT_AT))
    assert stays.digest() == expected_at(KEPT_AT).digest()
    needed = {file_name(blob) for held in publisher._held.values() for blob in blobs_of(held)}
    await world.call(SharingRank.served_bytes)
    return Told(publisher.latest, await asyncio.to_thread(blobs_in, directory), needed)


async def _overtake(world: World, publisher: WeightPublisher, directory: Path, store: HeldStore) -> Told:
    """Publish a version whole while the snapshot of the one before is being written."""
    for version in range(LOST_AT + 1):
        await world.call(SharingRank.become, version)
        await _publish_one(world, publisher, version)
    await store.waits.wait()
    await world.call(SharingRank.become_random)
    await _publish_one(world, publisher, LOST_AT + 1)
    assert not publisher.latest.deltas
    store.overtaken.set()
    await publisher.snapshots_written()
    needed = {file_name(blob) for held in publisher._held.values() for blob in blobs_of(held)}
    return Told(publisher.latest, await asyncio.to_thread(blobs_in, directory), needed)


async def _publish_one(world: World, publisher: WeightPublisher, version: int) -> PolicyManifest:
    copied = await world.call(Rank.copy_weights)
    tensors = await copied.arrived()
    return await publisher.publish(tensors, policy_version=version, stage="rl", trains_from=0)


def blobs_in(directory: Path) -> set[str]:
    return {path.name for path in directory.rglob("*.blob")}


@pytest.mark.nats
@pytest.mark.slow
@pytest.mark.usefixtures("bus")
async def test_receivers_take_from_each_rank_what_that_has(server: NatsServer, worlds, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    ranks = 3
    told, *_ = await asyncio.to_thread(worlds.run, ranks, publish, server.url, tmp_path)
    manifest = told.manifest
    assert len({blob.origin for blob in manifest.snapshot_blobs}) == ranks
    assert [len(delta.blobs) for delta in manifest.deltas] == [ranks] * len(manifest.deltas)
    assert told.files == told.needed, "old weights stay on some rank"
    sent = [int((tmp_path / f"sent-{rank}").read_text()) for rank in range(ranks)]
    assert max(sent) < 1.5 * sum(sent) / ranks, "rank 0 sends more than its share"


@pytest.mark.nats
@pytest.mark.slow
@pytest.mark.usefixtures("bus")
async def test_each_rank_writes_its_part_of_a_version_that_stays_for_a_later_learner_of_fewer_ranks(
    server: NatsServer, worlds, tmp_path
):
    (tmp_path / "config.json").write_text("{}")
    await asyncio.to_thread(worlds.run, 3, publish, server.url, tmp_path)
    kept = tmp_path / "kept" / f"version-{KEPT_AT}"
    sizes = [(kept / name).stat().st_size for name in weight_files(kept)]
    assert len(sizes) == 3
    assert max(sizes) < 1.5 * sum(sizes) / 3, "rank 0 writes more than its share"
    told, *_ = await asyncio.to_thread(
        worlds.run, 2, partial(publish, first=KEPT_AT + 1), server.url, tmp_path
    )
    [version] = told.manifest.kept
    assert len({blob.origin for blob in version.blobs}) == 2
    assert told.files == told.needed
    (kept / list(weight_files(kept))[1]).write_bytes(b"")
    with pytest.raises(AssertionError, match="are no header of safetensors"):
        await asyncio.to_thread(worlds.run, 2, partial(publish, first=KEPT_AT + 1), server.url, tmp_path)


@pytest.mark.nats
@pytest.mark.slow
@pytest.mark.usefixtures("bus")
async def test_a_snapshot_that_a_whole_version_overtakes_stays_on_no_rank(
    server: NatsServer, worlds, tmp_path
):
    (tmp_path / "config.json").write_text("{}")
    work = partial(publish, overtakes=True)
    told, *_ = await asyncio.to_thread(worlds.run, 2, work, server.url, tmp_path)
    assert told.manifest.snapshot_at == LOST_AT + 1
    assert told.files == told.needed


@pytest.mark.nats
@pytest.mark.slow
async def test_a_version_that_a_rank_did_not_finish_is_not_announced_and_the_next_learner_goes_on(
    server: NatsServer, bus: Bus, worlds, tmp_path
):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises((EOFError, OSError)):
        await asyncio.to_thread(worlds.run, 2, publish, server.url, tmp_path, 1)
    assert (tmp_path / "outcome").read_text() == f"announced {LOST_AT - 1}"
    [announced, _] = await bus.get("policy", PolicyManifest)
    assert announced.policy_version == LOST_AT - 1
    told, *_ = await asyncio.to_thread(worlds.run, 2, publish, server.url, tmp_path)
    assert told.manifest.policy_version == VERSIONS - 1
    assert told.files == told.needed, "what the lost rank stored is still there"
