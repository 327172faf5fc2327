"""Weights that a model has in a wider dtype than its others are published as the learner has them."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.engines.embedded.prepared_weights import prepare_weights
from actors.weights.follow import fetch_state
from bus.messages import PolicyManifest
from learner.backends.megatron.trainer import Trainer
from learner.config.optimizer import OptimizerConfig
from learner.config.publication import PublicationConfig
from learner.data.packing import pack
from learner.model_directories.model_directory import HFWeights
from learner.publication.dtypes import exact_dtypes
from learner.publication.host_copy import HostCopy, copy_weights, host_tensors
from learner.publication.publisher import WeightPublisher
from learner.scratch_model import ensure_model_directory
from storage.weights.blob_sources import Blobs
from storage.weights.blob_stores import BusBlobs
from storage.weights.tensors import Weights
from tests.learner.mini_run import SCRATCH, in_one_process, mini_run
from tests.learner.tiny import TIS, hf_state, random_samples, tiny_model

ROUTER = "mlp.gate.weight"
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def mixed(model):
    """The weights of a model whose router alone is float32."""
    return {
        name: weight.detach().clone() if name.endswith(ROUTER) else weight.detach().bfloat16()
        for name, weight in hf_state(model).items()
    }


async def copied(host, trainer):
    with ThreadPoolExecutor(1) as thread:
        return await (await copy_weights(host, trainer, thread)).arrived()


@pytest.mark.parametrize(
    ("published", "trained", "kinds", "exact"),
    [
        (BF16, F32, (F32, BF16, BF16), {"router": F32}),
        (BF16, F32, (F32, F16, F16), {"router": F32}),
        (BF16, F32, (BF16, F32, F32), {}),  # most are float32, and are rounded as before
        (BF16, F32, (F32, F32, F32), {}),
        (BF16, F32, (BF16, BF16, BF16), {}),
        (BF16, BF16, (F32, BF16, BF16), {}),  # the learner has nothing that is more exact
        (F32, F32, (F32, BF16, BF16), {}),
        (F32, BF16, (F32, BF16, BF16), {}),
    ],
)
def test_only_a_weight_that_would_be_rounded_has_a_dtype_of_its_own(published, trained, kinds, exact):
    sizes = {"router": 1, "up": 9, "down": 9}
    state = {
        name: torch.zeros(size, dtype=kind) for (name, size), kind in zip(sizes.items(), kinds, strict=True)
    }
    assert exact_dtypes(state, published, trained) == exact


def test_tensors_that_are_no_weights_are_passed_over(tmp_path):
    tensors = {
        "ids": torch.zeros(99, dtype=torch.int64),
        "router": torch.zeros(1),
        "up": torch.zeros(9, dtype=BF16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert exact_dtypes(HFWeights(tmp_path), BF16, F32) == {"router": F32}


@pytest.mark.parametrize("of_files", [F32, BF16])
@pytest.mark.parametrize("published", [F32, BF16])
def test_a_model_of_one_dtype_is_published_in_one_as_ever(tmp_path, of_files, published):
    model = tiny_model("qwen3_moe")
    weights = {name: weight.detach().to(of_files) for name, weight in hf_state(model).items()}
    save_file(weights, tmp_path / "model.safetensors")
    state = HFWeights(tmp_path)
    trainer = Trainer(model.config, state, OptimizerConfig(lr=1e-2), dtype=F32)
    found = asyncio.run(copied(HostCopy(published, exact_dtypes(state, published, F32)), trainer))
    wanted = host_tensors({name: weight.to(published) for name, weight in trainer.export().items()})
    assert Weights.of(1, found).digest() == Weights.of(1, wanted).digest()


@pytest.mark.nats
async def test_a_router_in_float32_reaches_the_engine_exactly_by_snapshot_and_by_delta(bus, tmp_path):
    model = tiny_model("qwen3_moe")
    save_file(mixed(model), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    state = HFWeights(tmp_path)
    trainer = Trainer(model.config, state, OptimizerConfig(lr=1e-4), dtype=F32)
    host = HostCopy(BF16, exact_dtypes(state, BF16, F32))
    publisher = WeightPublisher(bus, BusBlobs(bus), PublicationConfig(snapshot_every=9), incarnation="one")
    await publisher.start(tmp_path)
    for version in range(2):
        if version > 0:
            trainer.train_step(pack(random_samples([5, 9]), 40), TIS, policy_version=version)
        manifest = await publisher.publish(
            await copied(host, trainer), policy_version=version, stage="rl", trains_from=0
        )
        found, exact = await fetch_state(Blobs(bus), manifest), trainer.export()
        assert (manifest.snapshot_at, len(manifest.deltas)) == (0, version)
        for name, weight in exact.items():
            assert found[name].dtype == (F32 if name.endswith(ROUTER) else BF16)
            assert torch.equal(found[name], weight.to(found[name].dtype))
    routers = [name for name in exact if name.endswith(ROUTER)]
    assert len(routers) == 2
    assert not any(torch.equal(exact[name], exact[name].bfloat16().float()) for name in routers)
    for dtype in (F32, BF16):  # an engine computes in its own dtype
        ready = prepare_weights(model.to(dtype), found, complete=True)
        assert all(torch.equal(ready[name], exact[name].to(dtype)) for name in routers)


@pytest.mark.slow
@pytest.mark.nats
async def test_a_learner_publishes_what_its_model_has_in_float32_as_it_is(bus, tmp_path, monkeypatch):
    in_one_process(monkeypatch)
    ensure_model_directory(tmp_path / "model", SCRATCH, seed=3)
    file = tmp_path / "model/model.safetensors"
    weights = load_file(file)
    norms = {name for name in weights if name.endswith("norm.weight")}
    save_file({name: weight.to(F32 if name in norms else BF16) for name, weight in weights.items()}, file)
    async with mini_run(bus, tmp_path) as run:
        await run.train(steps=1)
    [manifest, _] = await bus.get("policy", PolicyManifest)
    found = await fetch_state(Blobs(bus), manifest)
    assert {name for name, weight in found.items() if weight.dtype == F32} == norms
    assert {weight.dtype for weight in found.values()} == {F32, BF16}
    assert any(not torch.equal(found[name], found[name].bfloat16().float()) for name in norms)
