"""Several ranks publish together what one rank that gathers all weights would, to the byte."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from actors.weights.received import Receiver
from bus.config import BusConfig
from bus.connection import Bus
from bus.errors import StorageError
from bus.server.nats_server import NatsServer
from learner.backends.factory import build_backend
from learner.config.learner import LearnerConfig
from learner.config.lora import NO_LORA, LoraConfig
from learner.config.model import ModelConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.config.publication import PublicationConfig
from learner.data.packing import pack
from learner.distributed.process_group import gathered
from learner.host_memory.copies import host_tensors
from learner.publication import divided_weights
from learner.publication.announcement import blobs_of
from learner.publication.publisher import WeightPublisher
from learner.publication.shared_copy import SharedCopy
from learner.publication.tensor_encoder import TensorEncoder
from learner.world.channel import Channel
from learner.world.rank import Rank
from learner.world.world import World
from storage.settings.weights_transport import BusTransport, FilesTransport, HttpTransport, Transport
from storage.weights.blob_files import file_name
from storage.weights.blob_sources import Blobs
from storage.weights.blob_stores import blob_store
from storage.weights.delta_format import DeltaHeader, read_delta
from storage.weights.tensors import Weights, own
from tests.learner.division import divide_world
from tests.learner.mini_run import MiniRun
from tests.learner.tiny import TIS, hf_state, random_samples, tiny_model
from tests.storage.weights.encoded import encode_delta

VERSIONS = 5
SLOWLY = {"snapshot_every": 2, "snapshot_bytes_per_s": 60_000}
"""Snapshots are still being written when their memory has later versions."""
CASES = {
    "fsdp": (2, "fsdp", {}, {"family": "qwen3", "tied": True}, SLOWLY),
    "megatron": (2, "megatron", {"tensor": 2, "sequence": True}, {"family": "glm4_moe"}, {}),
    "fp8": (2, "megatron", {"pipeline": 2}, {"family": "qwen3"}, {"quantisation": "fp8_block"}),
    "mixture": (4, "fsdp", {}, {"family": "qwen3_moe"}, {"quantisation": "fp8_tensor"}),
    "stacks": (4, "megatron", {"expert": 2, "pipeline": 2}, {"family": "gpt_oss"}, SLOWLY),
    "fsdp merged": (2, "fsdp", {}, {"family": "qwen3_moe"}, {}),
    "megatron merged": (2, "megatron", {"tensor": 2}, {"family": "qwen3"}, SLOWLY),
}
MERGED = LoraConfig(rank=2, publish="merged", weight_decomposed=True)


IN_SMALL_CHUNKS = ("megatron", "mixture")


def transport_of(name: str, directory: Path) -> Transport:
    if name in ("megatron", "mixture"):
        return FilesTransport(directory=directory / "shared")
    return HttpTransport() if name in ("fsdp", "stacks") else BusTransport()


class TrainingRank(Rank):
    def train_a_little(self, seed: int) -> None:
        samples = random_samples([9, 17, 5, 12], seed=seed)[self.share :: self.shares]
        self._backend.train_step(pack(samples, 40), TIS, policy_version=0)

    async def trained(self, seed: int) -> Weights:
        """Train; return all weights as rank 0 gathers them, and has them in the dtype of publication."""

        def work() -> Weights:
            self.train_a_little(seed)
            exact, whole = self._backend.exported().exact, self._backend.export()
            return Weights.of(
                seed, host_tensors({n: t.to(exact.get(n, torch.bfloat16)).cpu() for n, t in whole.items()})
            )

        return await self.in_thread(work)

    async def spoil(self) -> None:
        """Make a weight infinite that the last rank trains and has."""
        if dist.get_rank() == dist.get_world_size() - 1:
            named = [each for chunk in self._backend.chunks for each in chunk.named_parameters()]
            [*_, weight] = (each for name, each in named if name.endswith("linear_fc2.weight"))
            weight.data[0, 0] = torch.inf

    async def changes(self) -> int:
        """Return how many changes the ranks exchanged for the newest version."""
        newest = [each._newest for each in self._host.divided._of_dtypes]
        mine = sum(len(changes.places) for some in newest if some for changes in some)
        return sum(await self.in_thread(lambda: gathered(mine)))

    async def bytes_held(self) -> tuple[list[int], int]:
        """Return the bytes of each rank's two sets of tensors and of its copy for comparing, and of all."""
        divided = self._host.divided
        mine = [
            sum(each.nbytes for each in (*some._sets, *(chunk._kept for chunk in some._chunks)))
            for some in divided._of_dtypes
        ]
        whole = sum(torch.Size(shape).numel() * 2 for shape in divided.shapes.values())
        return await self.in_thread(lambda: gathered(sum(mine))), whole


def publish(url: str, directory: Path, name: str) -> tuple[list[int], int] | None:
    with pytest.MonkeyPatch.context() as patched:
        if name in IN_SMALL_CHUNKS:
            patched.setattr(divided_weights, "CHUNK_ELEMENTS", {"cpu": 1000})
            patched.setattr(divided_weights, "ROUND_ELEMENTS", 5000)
            patched.setattr(divided_weights, "WAITING_CHANGES", 700)
        return asyncio.run(_publish(url, directory, name))


async def _publish(url: str, directory: Path, name: str) -> tuple[list[int], int] | None:
    _, backend_name, layout, family, publication = CASES[name]
    torch.manual_seed(0)
    model, parallel, stop = tiny_model(**family), ParallelConfig(**layout), asyncio.Event()
    divide_world(parallel)
    backend = build_backend(
        ModelConfig(dtype="bfloat16"), model.config, hf_state(model), OptimizerConfig(lr=3e-6), parallel,
        backend=backend_name, lora=MERGED if "merged" in name else NO_LORA,
    )  # fmt: skip
    settings = MiniRun(None, directory, None, directory / "none").settings()
    learner = LearnerConfig(backend=backend_name, publication=PublicationConfig(threads=1, **publication))
    settings = replace(settings, learner=learner, model=ModelConfig(dtype="bfloat16"))
    with ThreadPoolExecutor(1) as thread:
        rank = TrainingRank(backend, settings, reader=None, demonstrations=None, thread=thread)
        world = World(Channel(stop), rank, settings)
        async with Bus.connect(BusConfig(url=url), "test", name=f"rank {dist.get_rank()}") as bus:
            if dist.get_rank() > 0:
                store = blob_store(bus, transport_of(name, directory), directory, dist.get_rank())
                async with rank.publishing_to(store):
                    await world.follow()
                return None
            async with world.led(stop):
                await publish_and_compare(bus, world, rank, name, directory)
                return await world.call(TrainingRank.bytes_held)


async def publish_and_compare(bus: Bus, world: World, rank: Rank, name: str, directory: Path) -> None:
    config = rank._settings.learner.publication
    others, encoder = rank.other_ranks(lambda wish: world.send(Rank.fulfil, wish)), TensorEncoder(config)
    reads, read = [], others._read
    others._read = lambda *asked: (reads.append(asked), read(*asked))[1]
    store = blob_store(bus, transport_of(name, directory), directory)
    publisher = WeightPublisher(bus, store, config, incarnation="one", others=others)
    await publisher.start(directory)
    receiver, expected_of = Receiver(Blobs(bus)), dict[int, Weights]()
    for version in range(VERSIONS):
        whole = await world.call(TrainingRank.trained, version)
        expected = Weights.of(version, encoder.in_format(whole.tensors))
        copied = await world.call(Rank.copy_weights)
        exchanged = await world.call(TrainingRank.changes)
        await world.call(TrainingRank.trained, 100 + version)  # what is copied stays as it is
        manifest = await publisher.publish(
            await copied.arrived(), policy_version=version, stage="rl", trains_from=0
        )
        announced = publisher.announced()
        assert announced.digest() == expected.digest()
        assert len(own(announced.tensors)) < len(announced.tensors)
        if manifest.snapshot_at < version:
            delta = encode_delta(expected_of[version - 1], version, expected.tensors)
            assert 0 < delta.sent_words < expected.words / 2
            found = [bytes(await Blobs(bus).get(blob)) for blob in manifest.deltas[-1].blobs]
            assert by_tensor(*found) == by_tensor(delta.data)
            assert max(map(len, found[1:])) < sum(map(len, found)) / 2
            assert publisher.figures["weights/wire_bytes"] == sum(map(len, found))
            if config.snapshot_every == 2:  # neither in small chunks nor quantised
                assert exchanged == delta.sent_words
        assert (await receiver.advance(manifest)).digest() == expected.digest()
        expected_of[version] = expected
    assert manifest.deltas, "no version was a delta"
    await publisher.snapshots_written()
    latest = publisher.latest
    assert (latest.snapshot_at > 0) == (config.snapshot_every == 2)
    assert len(latest.snapshot_blobs) == dist.get_world_size()
    assert (await Receiver(Blobs(bus)).from_snapshot(latest)).digest() == expected.digest()
    assert not reads, "rank 0 fetched tensors of others"
    sent, alone = [await asyncio.to_thread(SharedCopy, each) for each in (announced, expected)]
    assert bytes(sent.memory.bytes) == bytes(alone.memory.bytes), "a broadcast would have other weights"
    needed = {file_name(blob) for held in publisher._held.values() for blob in blobs_of(held)}
    if not isinstance(transport_of(name, directory), BusTransport):
        assert await asyncio.to_thread(blobs_in, directory) == needed
    if config.quantisation == "fp8_block":
        await world.call(TrainingRank.spoil)
        copied = await world.call(Rank.copy_weights)
        with pytest.raises(
            StorageError, match=r"layers\.1\.mlp\.down_proj\.weight has values that are not finite"
        ):
            await publisher.publish(await copied.arrived(), policy_version=9, stage="rl", trains_from=0)
    await publisher.close()


def blobs_in(directory: Path) -> set[str]:
    return {path.name for path in directory.rglob("*.blob")}


def by_tensor(*blobs: bytes) -> tuple[DeltaHeader, dict[str, list[bytes]]]:
    """Return what a delta says, in whatever order it names the tensors, and the bodies of each."""
    header, bodies = read_delta(blobs[0], blobs[1:])
    found = {change.name: [bytes(next(bodies)) for _ in change.parts] for change in header.changes}
    changes = tuple(sorted(header.changes, key=lambda change: change.name))
    return replace(header, changes=changes), found


@pytest.mark.nats
@pytest.mark.usefixtures("bus")
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name == "mixture" else ()) for name in CASES]
)
async def test_ranks_that_divide_the_weights_publish_what_one_rank_with_all_of_them_would(
    server: NatsServer, worlds, tmp_path, name
):
    (tmp_path / "config.json").write_text("{}")
    ranks = CASES[name][0]
    [(held, whole), *_] = await asyncio.to_thread(worlds.run, ranks, publish, server.url, tmp_path, name)
    assert sum(held) >= 3 * whole
    assert max(held) < 1.5 * 3 * whole / ranks, "a rank has more than its share"
