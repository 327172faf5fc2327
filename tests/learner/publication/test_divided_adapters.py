"""Several ranks publish the adapters that they train as one rank that gathers them would, to the bit."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from actors.other_policies.opponent_weights import manifest_at
from actors.weights.received import Receiver, torch_tensors
from bus.config import BusConfig
from bus.connection import Bus
from bus.server.nats_server import NatsServer
from learner.backends.factory import build_backend
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.config.learner import LearnerConfig
from learner.config.lora import LoraConfig
from learner.config.model import ModelConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.config.publication import PublicationConfig
from learner.host_memory.copies import host_tensors
from learner.model_directories.model_directory import HFWeights
from learner.publication.publisher import WeightPublisher
from learner.world.channel import Channel
from learner.world.rank import Rank
from learner.world.world import World
from storage.settings.weights_transport import HttpTransport
from storage.weights.blob_sources import Blobs
from storage.weights.blob_stores import blob_store
from storage.weights.tensors import Weights, own
from tests.learner.division import divide_world
from tests.learner.mini_run import MiniRun
from tests.learner.publication.test_divided_publication import TrainingRank
from tests.learner.tiny import hf_state, tiny_model

RANKS, VERSIONS = 2, 3
CASES = {
    "fsdp experts": ("fsdp", {}, "qwen3_moe", {"experts": True}),
    "fsdp lengths of rows": ("fsdp", {}, "qwen3", {"weight_decomposed": True}),
    "tensor parallel lengths of rows": ("megatron", {"tensor": 2}, "qwen3", {"weight_decomposed": True}),
    "expert parallel": ("megatron", {"expert": 2}, "qwen3_moe", {"experts": True}),
    "pipeline": ("megatron", {"pipeline": 2}, "qwen3", {}),
}


class AdaptedRank(TrainingRank):
    async def adapters(self, version: int) -> tuple[Weights, dict[str, torch.Tensor]]:
        """Return all adapters as rank 0 gathers them, in the dtypes of publication, and what they make."""

        def work() -> tuple[Weights, dict[str, torch.Tensor]]:
            backend = self._backend
            found = backend._adapters if isinstance(backend, FsdpTrainer) else backend.lora
            gathered = {name: t.to("cpu", copy=True) for name, t in found._streamed(torch.bfloat16)}
            merged = {name: t.to("cpu", copy=True) for name, t in backend.export().items()}
            return Weights.of(version, host_tensors(gathered)), merged

        return await self.in_thread(work)

    def frozen(self) -> Weights:
        """Return all frozen weights as one rank alone would publish them."""
        adapters = self._backend.adapters
        found = {n: adapters.base[n].to(adapters.exact.get(n, torch.bfloat16)) for n in adapters.base}
        return Weights.of(0, host_tensors(found))


def publish(url: str, directory: Path, name: str) -> None:
    asyncio.run(_publish(url, directory, name))


async def _publish(url: str, directory: Path, name: str) -> None:
    backend_name, layout, family, lora = CASES[name]
    torch.manual_seed(0)
    parallel, stop = ParallelConfig(**layout), asyncio.Event()
    divide_world(parallel)
    backend = build_backend(
        ModelConfig(dtype="bfloat16"), tiny_model(family=family).config, HFWeights(directory),
        OptimizerConfig(lr=1e-2), parallel, backend=backend_name, lora=LoraConfig(rank=2, alpha=3.0, **lora),
    )  # fmt: skip
    publication = PublicationConfig(threads=1, keep_versions=[1])
    settings = replace(
        MiniRun(None, directory, None, directory / "none").settings(),
        learner=LearnerConfig(backend=backend_name, publication=publication),
        model=ModelConfig(dtype="bfloat16"),
    )  # fmt: skip
    with ThreadPoolExecutor(1) as thread:
        rank = AdaptedRank(backend, settings, reader=None, demonstrations=None, thread=thread)
        world = World(Channel(stop), rank, settings)
        async with Bus.connect(BusConfig(url=url), "test", name=f"rank {dist.get_rank()}") as bus:
            store = blob_store(bus, HttpTransport(), directory / "weights", dist.get_rank())
            if dist.get_rank() > 0:
                async with rank.publishing_to(store):
                    await world.follow()
                return
            others = rank.other_ranks(lambda wish: world.send(Rank.fulfil, wish))
            publisher = WeightPublisher(
                bus, store, publication, incarnation="one", base=rank.adapter_base, others=others
            )
            await publisher.start(directory)
            async with world.led(stop):
                await publish_and_compare(bus, world, publisher, rank.frozen())
            await publisher.close()


async def publish_and_compare(bus: Bus, world: World, publisher: WeightPublisher, frozen: Weights) -> None:
    receiver = Receiver(Blobs(bus))
    for version in range(VERSIONS):
        await world.call(AdaptedRank.trained, version)
        expected, merged = await world.call(AdaptedRank.adapters, version)
        copied = await world.call(Rank.copy_weights)
        tensors = await copied.arrived()
        manifest = await publisher.publish(tensors, policy_version=version, stage="rl", trains_from=0)
        announced = publisher.announced()
        assert announced.digest() == expected.digest()
        assert 0 < len(own(announced.tensors)) < len(announced.tensors)
        assert len({blob.origin for blob in manifest.snapshot_blobs}) == RANKS
        base = manifest.adapted
        assert base.identity == frozen.digest().hex()
        assert len({blob.origin for blob in base.blobs}) == RANKS
        assert max(blob.size_bytes for blob in base.blobs) < 0.7 * frozen.size_bytes
        received = torch_tensors((await receiver.advance(manifest)).tensors)
        assert received.keys() == merged.keys()
        assert all(torch.equal(received[name], tensor) for name, tensor in merged.items())
        if version == 1:
            kept = expected
    await publisher.snapshots_written()
    alone = manifest_at(publisher.latest, 1)
    assert len({blob.origin for blob in alone.snapshot_blobs}) == RANKS
    assert (await Receiver(Blobs(bus))._from_snapshot(alone)).digest() == kept.digest()


@pytest.mark.nats
@pytest.mark.usefixtures("bus")
@pytest.mark.slow
@pytest.mark.first(3, others=pytest.mark.nightly)
@pytest.mark.parametrize("name", CASES)
async def test_ranks_publish_what_each_has_of_their_adapters(server: NatsServer, worlds, tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    model = tiny_model(family=CASES[name][2])
    state = {name: tensor.detach().bfloat16() for name, tensor in hf_state(model).items()}
    save_file(state, tmp_path / "model.safetensors")
    await asyncio.to_thread(worlds.run, RANKS, publish, server.url, tmp_path, name)
