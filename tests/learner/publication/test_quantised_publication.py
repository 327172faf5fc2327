"""Weights that are published in fp8: by snapshots and deltas, to the embedded engine, to the bit."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from actors.engines.embedded.prepared_weights import prepare_weights
from actors.weights.follow import PolicyFollower, fetch_model_files, fetch_state
from actors.weights.received import Receiver
from bus.errors import ConfigError, EngineError, StorageError
from learner.backends.megatron.trainer import Trainer
from learner.backends.quantised.rounding import Rounding
from learner.config.optimizer import OptimizerConfig
from learner.config.publication import PublicationConfig
from learner.data.packing import pack
from learner.host_memory.copies import host_tensors
from learner.publication.host_copy import HostCopy, copy_weights
from learner.publication.publisher import WeightPublisher
from storage.weights.blob_sources import Blobs
from storage.weights.blob_stores import BusBlobs
from storage.weights.quantisation import FORMATS, with_scales
from tests.learner.fp8_reference import served
from tests.learner.tiny import TIS, hf_state, random_samples, reference_logits, tiny_model

pytestmark = [pytest.mark.nats, pytest.mark.slow]
NAMES = list(FORMATS)
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "moe_intermediate_size": 128}
"""Sizes of a model whose layers have groups of 128 columns."""
PARTS = ("_packed", "_scale", "_shape")
TIMEOUT_S = 60
E4M3 = torch.float8_e4m3fn


class Learning:
    """A tiny learner and its publisher."""

    def __init__(self, bus, kind, name, **config):
        model = tiny_model(kind, **(WIDE if name == "int4" else {}))
        self.hf_config = model.config
        self.trainer = Trainer(model.config, hf_state(model), OptimizerConfig(lr=1e-3), dtype=torch.float32)
        self.host = HostCopy(torch.float32)
        self.publisher = WeightPublisher(
            bus, BusBlobs(bus), PublicationConfig(quantisation=name, **config), incarnation="one"
        )

    async def start(self, directory):
        self.hf_config.save_pretrained(directory)
        await self.publisher.start(directory)
        return self

    async def publish(self, version):
        if version > 0:
            self.trainer.train_step(pack(random_samples([5, 9]), 40), TIS, policy_version=version)
        with ThreadPoolExecutor(1) as thread:
            tensors = await (await copy_weights(self.host, self.trainer, thread)).arrived()
        return await self.publisher.publish(tensors, policy_version=version, stage="rl", trains_from=0)

    def served(self, name):
        return served(self.trainer.export(), name)


@pytest.mark.parametrize("name", NAMES)
async def test_an_engine_has_to_the_bit_what_fp8_makes_of_the_learners_weights(bus, tmp_path, name):
    learning = await Learning(bus, "qwen3_moe", name).start(tmp_path)
    digests = set()
    for version in range(2):
        manifest = await learning.publish(version)
        digests.add(learning.publisher.announced().digest())
        state = await fetch_state(Blobs(bus), manifest)
    assert len(manifest.deltas) == 1
    assert len(digests) == 2
    codes = {torch.int32, torch.int64} if name == "int4" else {E4M3}
    assert {tensor.dtype for tensor in state.values()} == {*codes, torch.float32}
    config = AutoConfig.for_model(**learning.hf_config.to_dict())
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(prepare_weights(model, state, complete=True))
    wanted = learning.served(name)
    assert hf_state(model).keys() == wanted.keys()
    for key, weight in hf_state(model).items():
        assert torch.equal(weight, wanted[key]), key
    own = learning.trainer.export()
    assert any(not torch.equal(own[key], wanted[key]) for key in own)  # the learner's are as they were


@pytest.mark.parametrize("name", NAMES)
async def test_engine_and_learner_differ_by_kernels_alone_where_the_learner_rounds_its_weights(
    bus, tmp_path, name
):
    learning = await Learning(bus, "qwen3_moe", name).start(tmp_path)
    samples = random_samples([5, 9])
    differences = []
    for aware in (False, True):
        if aware:
            learning.trainer.compute_with(Rounding(FORMATS[name], torch.float32))
        await learning.publish(2 * aware)
        manifest = await learning.publish(2 * aware + 1)
        model = AutoModelForCausalLM.from_config(learning.hf_config, dtype=torch.float32)
        model.load_state_dict(prepare_weights(model, await fetch_state(Blobs(bus), manifest), complete=True))
        [scored] = learning.trainer.logprobs(pack(samples, 40))
        with torch.no_grad():
            logprobs = torch.log_softmax(reference_logits(model, samples), -1)
        labels = torch.cat([torch.from_numpy(each.token_ids).long().roll(-1) for each in samples])
        served = logprobs.gather(-1, labels[:, None])[:, 0]
        differences.append((scored[0] - served).nan_to_num().abs().max())
    assert differences[0] > 1e-3
    assert differences[1] < 2e-5


@pytest.mark.parametrize("name", ["fp8_block", "fp8_tensor", "int4"])
async def test_deltas_of_codes_and_scales_lead_to_what_a_snapshot_would_have(bus, tmp_path, name):
    learning = await Learning(bus, "qwen3", name, snapshot_every=99).start(tmp_path)
    receiver, sizes = Receiver(Blobs(bus)), []
    for version in range(4):
        manifest = await learning.publish(version)
        assert len(manifest.deltas) == version
        got = await receiver.advance(manifest)
        sizes.append(learning.publisher.figures["weights/wire_bytes"])
        assert got.digest() == learning.publisher.announced().digest()
        assert got.policy_version == version
    whole = sum(tensor.words.nbytes for tensor in host_tensors(learning.trainer.export()).values())
    assert sizes[0] < 0.7 * whole  # the embeddings of this model are float32


async def test_what_only_its_scale_changed_reaches_the_engine_with_its_codes(bus, tmp_path):
    """Twice the weights have the same codes: the delta has scales alone, and the engine needs both."""
    learning = await Learning(bus, "qwen3", "fp8_block", snapshot_every=99).start(tmp_path)
    engine, stop = _Recording(), asyncio.Event()
    follower = PolicyFollower(bus, engine)
    running = asyncio.create_task(follower.run(stop))
    state = {key: weight.clone() for key, weight in learning.trainer.export().items()}
    name = "model.layers.1.mlp.up_proj.weight"
    async with asyncio.timeout(TIMEOUT_S):
        for version in range(2):
            tensors = host_tensors({**state, name: state[name] * 2**version})
            await learning.publisher.publish(tensors, policy_version=version, stage="rl", trains_from=0)
            await follower.at_least(version)
        stop.set()
        await running
    first, second = engine.loads
    assert len(first) > 20
    assert second.keys() == {name, f"{name}_scale_inv"}
    assert torch.equal(second[name].view(torch.uint8), first[name].view(torch.uint8))
    assert torch.equal(second[f"{name}_scale_inv"], 2 * first[f"{name}_scale_inv"])


class _Recording:
    """An engine that only keeps what it is given."""

    policy_version = -1

    def __init__(self):
        self.loads = []

    async def load_weights(self, state, policy_version):
        self.loads.append({key: tensor.clone() for key, tensor in state.items()})
        self.policy_version = policy_version
        return 0.0


async def publish_by(bus, directory, name, version, **config):
    """Publish a layer by a learner that begins."""
    made = WeightPublisher(
        bus, BusBlobs(bus), PublicationConfig(quantisation=name, **config), incarnation=f"{name}-{version}",
        kept=directory / "kept",
    )  # fmt: skip
    await made.start(directory)
    tensors = host_tensors({"layers.0.up_proj.weight": torch.ones(2, 128) + version})
    await made.publish(tensors, policy_version=version, stage="rl", trains_from=0)
    await made.snapshots_written()
    return made.latest


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("fp8_block", "none", "quantisation=none now, .* started for fp8_block or fp8_ue8m0: start"),
        ("none", "fp8_block", "quantisation=fp8_block or fp8_ue8m0 now, .* started for none: start"),
        ("fp8_block", "fp8_tensor", "quantisation=fp8_tensor now"),
        ("fp8_tensor", "int4", "quantisation=int4 now, .* started for fp8_tensor: start"),
    ],
)
async def test_an_actor_ends_when_a_resumed_learner_quantises_otherwise(bus, tmp_path, before, after, said):
    tiny_model("qwen3").config.save_pretrained(tmp_path)
    engine = _Recording()
    follower = PolicyFollower(bus, engine)
    running = asyncio.create_task(follower.run(asyncio.Event()))
    for version in range(2):  # a resume as it was changes nothing
        await publish_by(bus, tmp_path, before, version)
        await asyncio.wait_for(follower.at_least(version), TIMEOUT_S)
    await publish_by(bus, tmp_path, after, 2)
    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match=f"{said}.*this actor again")):
        await asyncio.wait_for(running, TIMEOUT_S)
    assert engine.policy_version == 1


@pytest.mark.parametrize(("before", "after"), [("fp8_block", "none"), ("none", "fp8_tensor")])
async def test_kept_versions_are_refused_where_others_are_quantised_otherwise(bus, tmp_path, before, after):
    tiny_model("qwen3").config.save_pretrained(tmp_path)
    for version in range(2):  # a resume as it was takes it over
        manifest = await publish_by(bus, tmp_path, before, version, keep_versions=[0])
        assert [kept.policy_version for kept in manifest.kept] == [0]
    with pytest.raises(ConfigError, match=rf"version-0 was .* set learner.publication.quantisation={before}"):
        await publish_by(bus, tmp_path, after, 2, keep_versions=[0])


async def test_engines_are_told_of_the_format_in_the_models_config(bus, tmp_path):
    learning = await Learning(bus, "qwen3_moe", "fp8_ue8m0").start(tmp_path / "model")
    manifest = await learning.publish(0)
    directory = await fetch_model_files(bus, manifest.model, tmp_path / "actor")
    own, told = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "model", directory))
    found = told.pop("quantization_config")
    assert told == own
    assert found.pop("modules_to_not_convert") == [
        "lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"
    ]  # fmt: skip
    assert found == {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128], "scale_fmt": "ue8m0",
    }  # fmt: skip


async def test_a_weight_that_is_not_finite_ends_the_publication_with_its_name(bus, tmp_path):
    learning = await Learning(bus, "qwen3", "fp8_block").start(tmp_path)
    state = dict(learning.trainer.export())
    name = "model.layers.0.self_attn.k_proj.weight"
    state[name] = state[name].clone()
    state[name][3, 5] = torch.inf
    with pytest.raises(StorageError, match=f"{name} has values that are not finite"):
        await learning.publisher.publish(host_tensors(state), policy_version=0, stage="rl", trains_from=0)
    assert learning.publisher.latest is None


async def test_an_int4_scale_that_changed_alone_reaches_the_engine_with_its_codes(bus, tmp_path):
    learning = await Learning(bus, "qwen3", "int4", snapshot_every=99).start(tmp_path)
    state = {key: weight.clone() for key, weight in learning.trainer.export().items()}
    name = "model.layers.1.mlp.up_proj.weight"
    receiver, digests = Receiver(Blobs(bus)), {}
    for version in range(2):
        tensors = host_tensors({**state, name: state[name] * 2**version})
        manifest = await learning.publisher.publish(
            tensors, policy_version=version, stage="rl", trains_from=0
        )
        got = await receiver.advance(manifest)
        changed, digests = got.changed_since(digests), got.digests
    assert changed.keys() == {f"{name}_scale"}
    assert with_scales(changed, got.tensors).keys() == {f"{name}{end}" for end in PARTS}
    [text] = [
        json.loads(content)
        for file, content in zip(
            learning.publisher._files.names, learning.publisher._files.contents, strict=True
        )
        if file == "config.json"
    ]
    assert text["quantization_config"]["format"] == "pack-quantized"


def test_codes_without_their_scales_are_refused_by_name():
    model = tiny_model("qwen3")
    name = "model.layers.0.mlp.up_proj.weight"
    codes = torch.from_numpy(np.zeros((96, 64), np.uint8)).view(E4M3)
    with pytest.raises(EngineError, match=rf"{name} is in fp8 and came without its scales"):
        prepare_weights(model, {name: codes}, complete=False)
    packed = {f"{name}_packed": torch.zeros(96, 8, dtype=torch.int32)}
    with pytest.raises(EngineError, match=rf"{name} is in int4 and came without {name}_scale and {name}_sh"):
        prepare_weights(model, packed, complete=False)
