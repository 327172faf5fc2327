"""Heads for several next tokens, which engines may guess with: nobody trains them, and they come out as they
went in."""

import asyncio

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from actors.engines.embedded.prepared_weights import prepare_weights
from bus.errors import EngineError
from learner.backends.megatron.trainer import Trainer
from learner.backends.model_loading import load_hf_directory
from learner.checkpoint.commit import save_checkpoint
from learner.config.lora import NO_LORA, LoraConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.convert.megatron import hf_to_megatron, megatron_to_hf
from learner.data.packing import pack
from learner.model_directories.lazy_weights import SomeWeights
from learner.publication.host_copy import HostCopy
from tests.learner.division import divide_world
from tests.learner.tiny import TIS, hf_state, random_samples, tiny_model

FAMILIES = ("deepseek_v3", "glm4_moe")
BIAS = "model.layers.2.mlp.gate.e_score_correction_bias"


def heads(dtype=torch.float32):
    torch.manual_seed(7)
    return {
        "model.layers.2.eh_proj.weight": torch.randn(64, 128, dtype=dtype),
        "model.layers.2.enorm.weight": torch.randn(64, dtype=dtype),
        BIAS: torch.randn(8),
    }


def trainer_of(family, *, dtype=torch.float32, **settings):
    model = tiny_model(family, num_mtp_layers=1)
    return Trainer(
        model.config, {**hf_state(model), **heads(dtype)}, OptimizerConfig(lr=1e-2), dtype=dtype, **settings
    )


def step(trainer):
    trainer.train_step(pack(random_samples([9, 14, 5]), 100), TIS, policy_version=3)


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        assert tensor.equal(expected[name]), name


def behind(weights):
    return {name: tensor for name, tensor in weights.items() if name.startswith("model.layers.2.")}


@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_exported_as_they_came_before_and_after_a_step(family):
    with capture_logs() as said:
        trainer = trainer_of(family)
    assert [(each["event"], each["tensors"]) for each in said] == [("weights_not_trained", 3)]
    for _ in range(2):
        same(behind(trainer.export()), heads())
        step(trainer)


def test_they_are_published_in_their_own_types():
    trainer = trainer_of("deepseek_v3", dtype=torch.bfloat16)
    published = asyncio.run(HostCopy(torch.bfloat16).take(trainer.exported()).arrived())
    own = {name: published[name].dtype for name in heads()}
    assert own == {name: "F32" if name == BIAS else "BF16" for name in heads()}
    words = published["model.layers.2.eh_proj.weight"].words
    assert (
        words.tobytes()
        == heads(torch.bfloat16)["model.layers.2.eh_proj.weight"].view(torch.int16).numpy().tobytes()
    )


class CountedReads(SomeWeights):
    """Weights that note which of them were read."""

    def __init__(self, state):
        super().__init__(state, state.keys())
        self.read = []

    def __getitem__(self, name):
        self.read.append(name)
        return super().__getitem__(name)


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize("lora", [NO_LORA, LoraConfig(rank=2, targets=("o_proj",), publish="merged")])
def test_they_are_read_once_for_each_of_the_two_copies_on_the_host(lora):
    model = tiny_model("glm4_moe", num_mtp_layers=1)
    state = CountedReads({**hf_state(model), **heads()})
    trainer, host = Trainer(model.config, state, OptimizerConfig(lr=1e-2), lora=lora), HostCopy(torch.float32)
    state.read.clear()
    for _ in range(4):
        published = asyncio.run(host.take(trainer.exported()).arrived())
        for name, tensor in heads().items():
            assert published[name].words.tobytes() == tensor.numpy().tobytes()
        step(trainer)
    assert sorted(name for name in state.read if name in heads()) == sorted([*heads()] * 2)


@pytest.mark.parametrize("publish", ["merged", "adapter"])
def test_they_go_along_with_adapters(publish):
    lora = LoraConfig(rank=2, targets=("o_proj",), publish=publish)
    trainer = trainer_of("deepseek_v3", lora=lora)
    step(trainer)
    host = HostCopy(torch.float32)
    published = asyncio.run(host.take(trainer.exported()).arrived())
    if publish == "adapter":
        published = host.as_published(trainer.adapters).tensors
    assert {*heads()} <= {*published}


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize("family", FAMILIES)
def test_conversion_keeps_them_there_and_back(tmp_path, family):
    model = tiny_model(family, num_mtp_layers=1)
    model.save_pretrained(tmp_path / "hf")
    [file] = (tmp_path / "hf").glob("*.safetensors")
    save_file({**load_file(file), **heads()}, file, metadata={"format": "pt"})
    assert str(hf_to_megatron(tmp_path / "hf", tmp_path / "megatron")).endswith(
        "3 of them of heads for several next tokens"
    )
    config, state = load_hf_directory(tmp_path / "megatron")
    same(behind(Trainer(config, state, OptimizerConfig()).export()), heads())
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    [back] = (tmp_path / "back").glob("*.safetensors")
    same(load_file(back), load_file(file))


@pytest.mark.slow
def test_a_checkpoint_of_a_run_gets_them_from_the_model_it_began_with(tmp_path):
    trainer = trainer_of("glm4_moe")
    save_checkpoint(trainer, tmp_path / "checkpoints", 1, {}, keep=1)
    begun_with = tmp_path / "model"
    tiny_model("glm4_moe", num_mtp_layers=1).save_pretrained(begun_with)
    [file] = begun_with.glob("*.safetensors")
    save_file({**load_file(file), **heads()}, file, metadata={"format": "pt"})
    step(trainer)
    save_checkpoint(trainer, tmp_path / "checkpoints", 2, {}, keep=1)
    for name, model in (("with", begun_with), ("without", None)):
        megatron_to_hf(tmp_path / "checkpoints", tmp_path / name, model)
        [written] = (tmp_path / name).glob("*.safetensors")
        expected = (
            trainer.export() if model else {n: t for n, t in trainer.export().items() if n not in heads()}
        )
        same(load_file(written), expected)


def test_the_embedded_engine_has_no_use_for_them():
    model = tiny_model("deepseek_v3", num_mtp_layers=1)
    state = {**hf_state(model), **heads()}
    assert prepare_weights(model, state, complete=True).keys() == model.state_dict().keys()
    with pytest.raises(EngineError, match=r"no tensors named model\.layers\.3\.enorm\.weight"):
        prepare_weights(model, {**state, "model.layers.3.enorm.weight": torch.zeros(64)}, complete=True)


def exported_by(layout):
    parallel = ParallelConfig(**layout)
    divide_world(parallel)
    trainer = trainer_of("deepseek_v3", parallel=parallel)
    step(trainer)
    exported = trainer.exported()
    return behind(trainer.export()), {name for name, _ in (*exported.rest(), *exported.unchanging())}


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tensor": 2, "sequence": True, "expert": 2}, {"pipeline": 2}])
def test_the_first_of_several_ranks_exports_them(worlds, layout):
    (found, rest), (others, no_rest) = worlds.run(2, exported_by, layout)
    same(found, heads())
    assert heads().keys() <= rest
    assert (others, no_rest) == ({}, set())
