"""From a learner that trains adapters to engines that know of none."""

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from actors.engines.served_adapters import KNOWN, ServedAdapters, served_adapters
from actors.settings.engines import SglangEngineConfig
from actors.weights import follow as following_policy
from actors.weights.follow import PolicyFollower, fetch_state
from actors.weights.received import Receiver, merged_weights, torch_tensors
from bus.errors import ConfigError, StorageError
from bus.messages import AdaptedBase, SnapshotWanted
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.megatron.trainer import Trainer
from learner.config.lora import LoraConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.publication import PublicationConfig
from learner.data.packing import pack
from learner.host_memory.copies import host_tensors
from learner.model_directories.model_directory import HFWeights
from learner.publication.announcement import AdapterBase
from learner.publication.host_copy import Copied, HostCopy, copy_weights
from learner.publication.publisher import WeightPublisher
from storage.model_files.adapter_names import adapter_names
from storage.weights.blob_sources import Blobs
from storage.weights.blob_stores import BusBlobs
from storage.weights.tensors import Weights
from tests.actors.weights.received_weights import Recording, damage
from tests.learner.tiny import TIS, hf_state, random_samples, tiny_model

pytestmark = [pytest.mark.nats, pytest.mark.slow]


SERVED = ServedAdapters(rank=2, scale=1.5, modules=tuple(sorted(KNOWN)), versions=6)


class Learner:
    """A backend, and the publication of what it trains."""

    def __init__(
        self, bus, directory, dtype, *, decomposed=False, backend=FsdpTrainer, family="qwen3", **config
    ):
        model = tiny_model(family)
        save_file({name: t.detach().to(dtype) for name, t in hf_state(model).items()},
                  directory / "model.safetensors")  # fmt: skip
        experts = family == "qwen3_moe"
        lora = LoraConfig(rank=2, alpha=3.0, weight_decomposed=decomposed, experts=experts)
        self.trainer = backend(
            model.config, HFWeights(directory), OptimizerConfig(lr=1e-2), dtype=dtype, lora=lora
        )
        self.host = HostCopy(dtype)
        self.made = 0
        base = AdapterBase(self.trainer.adapters.described, self.base)
        self.publisher = WeightPublisher(
            bus, BusBlobs(bus), PublicationConfig(**config), incarnation="one", base=base
        )

    def base(self):
        self.made += 1
        return self.host.as_published(self.trainer.adapters)

    async def publish(self, version):
        if version:
            self.trainer.train_step(pack(random_samples([5, 9], seed=version), 40), TIS, policy_version=1)
        with ThreadPoolExecutor(1) as thread:
            copied: Copied = await copy_weights(self.host, self.trainer, thread)
        return await self.publisher.publish(
            await copied.arrived(), policy_version=version, stage="rl", trains_from=0
        )


def assert_trained(weights, trainer):
    """The weights are to the bit those that the learner itself makes of its adapters."""
    found, wanted = torch_tensors(weights.tensors), trainer.export()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())


@pytest.mark.parametrize("decomposed", [False, True], ids=["plain", "with lengths of rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_actors_make_the_learners_weights_of_adapters_alone(bus, tmp_path, dtype, decomposed):
    learner = Learner(bus, tmp_path, dtype, decomposed=decomposed)
    await learner.publisher.start(tmp_path)
    receiver, digests, changed = Receiver(Blobs(bus)), {}, {}
    for version in range(4):
        manifest = await learner.publish(version)
        weights = await receiver.advance(manifest)
        assert_trained(weights, learner.trainer)
        changed[version] = set(weights.changed_since(digests))
        digests = weights.digests
        assert manifest.snapshot.size_bytes < manifest.adapted.weights.size_bytes / 3
        assert learner.publisher.figures["weights/wire_bytes"] <= manifest.snapshot.size_bytes
        assert learner.publisher.figures["weights/full_bytes"] == manifest.adapted.weights.size_bytes
    adapted = {name for name in changed[0] if "_proj" in name}
    assert changed == {0: set(learner.trainer.export()), **dict.fromkeys((1, 2, 3), adapted)}
    assert learner.made == 1  # the frozen weights were stored once
    assert_trained(await Receiver(Blobs(bus)).from_snapshot(manifest), learner.trainer)  # a late joiner


@pytest.mark.parametrize(
    ("dtype", "backend", "decomposed"),
    [
        pytest.param(torch.float32, Trainer, False, marks=pytest.mark.nightly),
        (torch.float32, Trainer, True),
        pytest.param(torch.float32, FsdpTrainer, False, marks=pytest.mark.nightly),
        pytest.param(torch.bfloat16, Trainer, False, marks=pytest.mark.nightly),
        pytest.param(torch.bfloat16, Trainer, True, marks=pytest.mark.nightly),
        (torch.bfloat16, FsdpTrainer, False),
    ],
)
async def test_actors_make_the_learners_experts_of_their_adapters(bus, tmp_path, dtype, backend, decomposed):
    learner = Learner(bus, tmp_path, dtype, decomposed=decomposed, backend=backend, family="qwen3_moe")
    await learner.publisher.start(tmp_path)
    receiver, digests = Receiver(Blobs(bus)), {}
    for version in range(3):
        manifest = await learner.publish(version)
        weights = await receiver.advance(manifest)
        assert_trained(weights, learner.trainer)
        changed = {name for name in weights.changed_since(digests) if ".mlp.experts." in name}
        assert len(changed) == 2 * 6 * 3, "each version changes the digest of every expert's weights"
        digests = weights.digests
        adapters = sum(tensor.numel() for _, tensor in learner.trainer.adapters.streamed())
        assert manifest.snapshot.size_bytes < adapters * (4 if decomposed else dtype.itemsize) + 50_000
        assert learner.publisher.figures["weights/full_bytes"] == manifest.adapted.weights.size_bytes
    assert learner.made == 1
    with pytest.raises(ConfigError, match=r"no adapters of routed experts, as experts\.down_proj"):
        served_adapters(
            SglangEngineConfig(adapter="loaded"),
            replace(manifest.adapted, weight_decomposed=False),
            max_staleness=4,
        )


async def test_an_engine_that_adds_adapters_itself_is_given_both_and_then_adapters_alone(bus, tmp_path):
    learner = Learner(bus, tmp_path, torch.bfloat16)
    await learner.publisher.start(tmp_path)
    engine, stop = Recording(), asyncio.Event()
    follower = PolicyFollower(bus, engine, served=SERVED)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(follower.run(stop))
        for version in range(3):
            manifest = await learner.publish(version)
            await follower.at_least(version)
        stop.set()
    base = torch_tensors(learner.base().tensors)
    adapters = {name: t.bfloat16() for name, t in learner.trainer.adapters.streamed()}
    (_, first), *later = engine.given
    assert first == base.keys() | adapters.keys()
    assert [version for version, _ in engine.given] == [0, 1, 2]
    assert all(names <= adapters.keys() for _, names in later)
    assert all(torch.equal(engine.state[name], tensor) for name, tensor in (base | adapters).items())
    assert served_adapters(SglangEngineConfig(adapter="loaded"), manifest.adapted, max_staleness=4) == SERVED


async def test_whole_weights_that_follow_adapters_which_the_engine_adds_itself_end_the_actor(bus, tmp_path):
    learner = Learner(bus, tmp_path, torch.bfloat16)
    await learner.publisher.start(tmp_path)
    engine, stop = Recording(), asyncio.Event()
    follower = PolicyFollower(bus, engine, served=SERVED)
    running = asyncio.create_task(follower.run(stop))
    await learner.publish(0)
    await asyncio.wait_for(follower.at_least(0), 20)
    merged = WeightPublisher(bus, BusBlobs(bus), PublicationConfig(), incarnation="two")
    await merged.start(tmp_path)
    await merged.publish(host_tensors(learner.trainer.export()), policy_version=1, stage="rl", trains_from=0)
    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match="publishes whole weights: .*adapter=merged")):
        await asyncio.wait_for(running, 20)
    assert [version for version, _ in engine.given] == [0]


class Counted(Blobs):
    """Counts how often each blob is fetched."""

    def __init__(self, bus):
        super().__init__(bus)
        self.fetched = Counter()

    async def get(self, ref):
        self.fetched[ref] += 1
        return await super().get(ref)


async def test_rollouts_evaluations_and_opponents_of_a_process_fetch_the_base_once(bus, tmp_path):
    learner, blobs = Learner(bus, tmp_path, torch.float32), Counted(bus)
    await learner.publisher.start(tmp_path)
    receiver = Receiver(blobs)
    for version in range(2):
        manifest = await learner.publish(version)
        await asyncio.gather(receiver.advance(manifest), *(fetch_state(blobs, manifest) for _ in range(2)))
    assert blobs.fetched[manifest.adapted.weights] == 1
    assert_trained(await Receiver(blobs).advance(manifest), learner.trainer)


async def test_a_base_that_the_bus_lost_is_stored_again(bus, tmp_path):
    learner = Learner(bus, tmp_path, torch.float32)
    await learner.publisher.start(tmp_path)
    await learner.publish(0)
    await bus.js.purge_stream(bus.topology.stream("WEIGHTS"))
    manifest = await learner.publish(1)
    assert_trained(await Receiver(Blobs(bus)).advance(manifest), learner.trainer)
    assert learner.made == 2


async def test_a_damaged_base_is_stored_again_for_who_cannot_read_it(bus, tmp_path, monkeypatch):
    monkeypatch.setattr(following_policy, "POLL_S", 0.05)
    monkeypatch.setattr(following_policy, "AGAIN_S", 0.1)
    learner = Learner(bus, tmp_path, torch.float32, snapshot_every=1)
    await learner.publisher.start(tmp_path)
    base = (await learner.publish(0)).adapted.weights
    await learner.publish(1)
    await damage(bus, base, flip=True)
    engine, stop = Recording(), asyncio.Event()
    follower = PolicyFollower(bus, engine)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(learner.publisher.serve(stop))
        tasks.create_task(follower.run(stop))
        await follower.at_least(1)
        stop.set()
    assert learner.made == 2
    assert_trained(await Receiver(Blobs(bus)).advance(learner.publisher.latest), learner.trainer)
    for _ in range(3):  # whoever cannot read it now has another trouble
        await learner.publisher._answer(
            SnapshotWanted(incarnation="one", policy_version=0, reason="a test", lacks_base=True)
        )
    assert learner.made == 2


async def test_the_base_outlives_versions_that_are_freed(bus, tmp_path):
    learner = Learner(bus, tmp_path, torch.float32, keep=2)
    await learner.publisher.start(tmp_path)
    for version in range(4):
        manifest = await learner.publish(version)
    assert_trained(await Receiver(Blobs(bus)).advance(manifest), learner.trainer)


@pytest.mark.parametrize("before", ["adapter", "merged"])
async def test_kept_versions_are_refused_where_others_are_published(bus, tmp_path, before):
    config, kept, tensors = PublicationConfig(keep_versions=[0]), tmp_path / "kept", {}
    for name in adapter_names("layer.weight") if before == "adapter" else ("layer.weight",):
        tensors[name] = torch.ones(2, 2)
    frozen = Weights.of(0, host_tensors({"layer.weight": torch.ones(2, 2)}))
    base = AdapterBase(lambda blobs, _: AdaptedBase(weights=blobs[0], scale=1.0), lambda: frozen)
    bases = [base, None] if before == "adapter" else [None, base]

    async def publish(incarnation, base):
        made = WeightPublisher(bus, BusBlobs(bus), config, incarnation=incarnation, kept=kept, base=base)
        await made.start(tmp_path)
        await made.publish(host_tensors(tensors), policy_version=0, stage="rl", trains_from=0)
        await made.snapshots_written()
        return made.latest

    for incarnation in ("one", "two"):  # a resume as it was takes it over
        assert [kept.policy_version for kept in (await publish(incarnation, bases[0])).kept] == [0]
    with pytest.raises(ConfigError, match=f"version-0 has .*: set learner.lora.publish={before} as it was"):
        await publish("three", bases[1])


async def test_a_step_that_changes_no_adapter_is_an_alarm(bus, tmp_path):
    learner = Learner(bus, tmp_path, torch.float32)
    await learner.publisher.start(tmp_path)
    for version in range(2):
        manifest = await learner.publish(version)
        assert not learner.publisher.alarm
    same = partial(learner.publisher.publish, stage="rl", trains_from=0)
    weights = learner.publisher.announced()
    await same(weights.tensors, policy_version=2)
    assert learner.publisher.alarm.startswith("version 2 is to the bit the one before it")
    assert manifest.policy_version == 1


async def test_lengths_of_rows_that_are_not_those_of_the_weight_are_refused(bus, tmp_path):
    learner = Learner(bus, tmp_path, torch.float32, decomposed=True)
    base = learner.base()
    adapters = {name: tensor.clone() for name, tensor in learner.trainer.adapters.streamed()}
    short = {name: tensor[:3] if tensor.ndim == 1 else tensor for name, tensor in adapters.items()}
    with pytest.raises(StorageError, match=r"\[3\] lengths of rows are not of \["):
        merged_weights(base, Weights.of(0, host_tensors(short)), 1.5)


async def test_adapters_of_another_model_are_refused(bus, tmp_path):
    learner = Learner(bus, tmp_path, torch.float32)
    await learner.publisher.start(tmp_path)
    manifest = await learner.publish(0)
    other = replace(manifest, adapted=replace(manifest.adapted, weights=manifest.snapshot))
    with pytest.raises(StorageError, match="are adapters of none of its frozen weights"):
        await asyncio.wait_for(Receiver(Blobs(bus)).advance(other), 20)
