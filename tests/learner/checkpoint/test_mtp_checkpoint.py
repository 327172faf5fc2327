"""A trained head is saved, resumed, published and converted with the policy."""

import asyncio

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from bus.errors import ConfigError
from learner.backends.megatron.core.process_groups import divide_world
from learner.backends.megatron.trainer import Trainer
from learner.backends.model_loading import load_hf_directory
from learner.backends.shared.trainable import TrainableWeights
from learner.checkpoint.commit import load_checkpoint, save_checkpoint
from learner.config.mtp import NO_MTP, MtpConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import UNDIVIDED, ParallelConfig
from learner.convert.megatron import hf_to_megatron, megatron_to_hf
from learner.data.packing import pack
from learner.distributed.process_group import gathered
from learner.publication.host_copy import HostCopy
from storage.disk.checkpoints import latest as latest_checkpoint
from tests.learner.mtp_reference import BEHIND_FAMILIES, FAMILIES, LAYER, ReferenceHead, by_day
from tests.learner.tiny import TIS, random_samples

TIED = ("qwen3_5_text",)
OF_BOTH_KINDS = ("deepseek_v3", "qwen3_5_text")
"""Families of both kinds of heads, one of which its weights' names alone tell."""
OTHER_HEAD = pytest.param("qwen3_next", marks=pytest.mark.nightly)
OPTIMIZER = OptimizerConfig(lr=1e-2, warmup_steps=4)
MTP = MtpConfig(weight=0.3)
BEGINS = (LAYER, "mtp.")
"""Begins the names of heads."""


def copies_of(family):
    """Names of the copies that files have of what the head shares, with those of the model's own."""
    if family not in BEHIND_FAMILIES:
        return {}
    return {
        f"{LAYER}embed_tokens.weight": "model.embed_tokens.weight",
        f"{LAYER}shared_head.head.weight": "lm_head.weight",
    }


def without_experts(names):
    """Names of weights that every token passes."""
    return {name for name in names if ".mlp.experts." not in name}


def model_of(family):
    """Configuration and weights, with the copies that files have of what the head shares."""
    reference = ReferenceHead(family, OPTIMIZER, tied=family in TIED)
    state = reference.state()
    copies = {copy: state[name].clone() for copy, name in copies_of(family).items()}
    return reference.model.config, {**state, **copies}


def trainer_of(family="deepseek_v3", *, mtp=MTP, **settings):
    return Trainer(*model_of(family), OPTIMIZER, mtp=mtp, **settings)


def step(trainer, number):
    return trainer.train_step(pack(random_samples([9, 14, 5], seed=number), 100), TIS, policy_version=3)


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape), name
        assert tensor.equal(expected[name]), name


def directory_of(path, family):
    config, state = model_of(family)
    config.save_pretrained(path)
    save_file({name: t.contiguous() for name, t in state.items()}, path / "model.safetensors")
    return state


@pytest.mark.parametrize("family", by_day(*BEHIND_FAMILIES))
def test_a_head_comes_out_as_it_went_in_to_the_bit(family):
    with capture_logs() as said:
        trainer = trainer_of(family)
    assert not [each for each in said if each["event"] == "weights_not_trained"]
    same(trainer.export(), model_of(family)[1])
    step(trainer, 0)
    found, before = trainer.export(), model_of(family)[1]
    unmoved = without_experts(name for name, tensor in found.items() if tensor.equal(before[name]))
    assert unmoved == {name for name in before if name.endswith("e_score_correction_bias")}
    for copy, name in copies_of(family).items():
        assert found[copy].equal(found[name])


@pytest.mark.slow
@pytest.mark.parametrize("family", by_day(*BEHIND_FAMILIES, "qwen3_next"))
def test_a_directory_that_was_converted_trains_alike(tmp_path, family):
    state = directory_of(tmp_path / "hf", family)
    hf_to_megatron(tmp_path / "hf", tmp_path / "megatron")
    config, converted = load_hf_directory(tmp_path / "megatron")
    trainer, other = Trainer(config, converted, OPTIMIZER, mtp=MTP), trainer_of(family)
    same(trainer.export(), state)
    assert step(trainer, 0) == step(other, 0)
    same(trainer.export(), other.export())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "distributed"),
    [
        *(pytest.param(f, True, marks=() if f in OF_BOTH_KINDS else pytest.mark.nightly) for f in FAMILIES),
        ("qwen3_next", False),
    ],
)
def test_a_checkpoint_becomes_a_directory_with_the_trained_head(tmp_path, family, distributed):
    directory_of(tmp_path / "hf", family)
    trainer = trainer_of(family, parallel=ParallelConfig(distributed_optimizer=distributed))
    step(trainer, 0)
    save_checkpoint(trainer, tmp_path / "checkpoints", 1, {}, keep=1)
    done = megatron_to_hf(tmp_path / "checkpoints", tmp_path / "with", tmp_path / "hf")
    assert "of heads for several next tokens" in str(done)
    same(load_file(next((tmp_path / "with").glob("*.safetensors"))), trainer.export())
    trainer.hf_config.save_pretrained(tmp_path / "config")
    megatron_to_hf(tmp_path / "checkpoints", tmp_path / "without", tmp_path / "config")
    copies = copies_of(family)
    without = {name: tensor for name, tensor in trainer.export().items() if name not in copies}
    same(load_file(next((tmp_path / "without").glob("*.safetensors"))), without)
    begun = Trainer(*load_hf_directory(tmp_path / "with"), OPTIMIZER, mtp=MTP)
    same(begun.export(), trainer.export())


@pytest.mark.first(1, others=pytest.mark.nightly)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("deepseek_v3", torch.float32),
        pytest.param("deepseek_v3", torch.bfloat16, marks=pytest.mark.nightly),
        ("qwen3_next", torch.float32),
        ("qwen3_5_text", torch.bfloat16),
    ],
)
def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(tmp_path, family, dtype):
    first = trainer_of(family, dtype=dtype)
    step(first, 0)
    save_checkpoint(first, tmp_path, 1, {}, keep=1)
    results = [step(first, number) for number in (1, 2)]
    second = trainer_of(family, dtype=dtype)
    step(second, 5)
    load_checkpoint(second, latest_checkpoint(tmp_path))
    assert [step(second, number) for number in (1, 2)] == results
    same(second.export(), first.export())


@pytest.mark.first(1, others=pytest.mark.nightly)
@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_a_checkpoint_without_a_head_leaves_that_of_the_model_to_be_trained_and_with_one_it_may_stay(
    tmp_path, family
):
    plain, copies = trainer_of(family, mtp=NO_MTP), copies_of(family)
    step(plain, 0)
    save_checkpoint(plain, tmp_path / "plain", 1, {}, keep=1)
    learning = trainer_of(family)
    with capture_logs() as said:
        load_checkpoint(learning, latest_checkpoint(tmp_path / "plain"))
    assert "next_token_head_not_in_checkpoint" in {each["event"] for each in said}
    own = {name: t for name, t in plain.export().items() if name not in copies}
    same({name: t for name, t in learning.export().items() if name not in copies}, own)
    assert step(learning, 1).diagnostics["mtp_grad_norm"] > 0
    save_checkpoint(learning, tmp_path / "learning", 2, {}, keep=1)
    with capture_logs() as said:
        load_checkpoint(plain, latest_checkpoint(tmp_path / "learning"))
    assert "next_token_head_left_behind" in {each["event"] for each in said}
    policy = {name: t for name, t in learning.export().items() if not name.startswith(BEGINS)}
    same({name: t for name, t in plain.export().items() if not name.startswith(BEGINS)}, policy)


@pytest.mark.slow
@pytest.mark.parametrize("freeze", [(), (r"layers\.2\.enorm",)], ids=["fewer", "more"])
def test_a_head_of_which_other_weights_were_frozen_is_refused_by_their_names(tmp_path, freeze):
    first = trainer_of(trainable=TrainableWeights(freeze=(r"layers\.2\.enorm",)[len(freeze) :]))
    save_checkpoint(first, tmp_path, 1, {}, keep=1)
    second = trainer_of(trainable=TrainableWeights(freeze=freeze))
    said = r"1 differ, as mtp\.layers\.0\.enorm\.weight\).*keep model\.freeze"
    with pytest.raises(ConfigError, match=said):
        load_checkpoint(second, latest_checkpoint(tmp_path))


def published_by(layout, family="deepseek_v3"):
    parallel = ParallelConfig(**layout)
    divide_world(parallel)
    trainer = trainer_of(family, dtype=torch.bfloat16, parallel=parallel)
    host, versions = HostCopy(torch.bfloat16), []
    for number in range(3):
        exported = trainer.exported()
        taken = asyncio.run(host.take(exported).arrived())
        mine = {name: (each.dtype, each.words.tobytes()) for name, each in taken.items()}
        versions.append({name: each for of_rank in gathered(mine) for name, each in of_rank.items()})
        step(trainer, number)
    return versions, len(trainer.export())


def assert_published(versions, tensors, family="deepseek_v3"):
    assert [len(version) for version in versions] == [tensors] * 3
    assert versions[0].keys() == model_of(family)[1].keys()
    constant = without_experts(name for name in versions[0] if versions[0][name] == versions[2][name])
    biases = {name for name in versions[0] if name.endswith("mlp.gate.e_score_correction_bias")}
    assert len(biases) == (2 if family == "deepseek_v3" else 0)
    assert constant == biases
    assert {name for name, (dtype, _) in versions[1].items() if dtype == "F32"} == constant
    for copy, name in copies_of(family).items():
        assert [version[copy] for version in versions] == [version[name] for version in versions]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_each_version_has_the_head_as_it_is_then(family):
    assert_published(*published_by({}, family), family)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "family"),
    [
        ({"tensor": 2, "sequence": True, "expert": 2}, "deepseek_v3"),
        ({"context": 2}, "deepseek_v3"),
        ({"pipeline": 2}, "deepseek_v3"),
        pytest.param({"tensor": 2, "sequence": True, "expert": 2}, "qwen3_next", marks=pytest.mark.nightly),
        ({"pipeline": 2}, "qwen3_5_text"),
    ],
)
def test_several_ranks_publish_it(worlds, layout, family):
    found, _ = worlds.run(2, published_by, layout, family)
    assert_published(*found, family)


def go_on(directory, layout, family):
    parallel = ParallelConfig(**layout)
    divide_world(parallel)
    trainer = trainer_of(family, parallel=parallel)
    load_checkpoint(trainer, directory)
    return trainer.export()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", OTHER_HEAD])
def test_another_layout_of_ranks_goes_on_with_the_head(worlds, tmp_path, family):
    trainer = trainer_of(family)
    step(trainer, 0)
    save_checkpoint(trainer, tmp_path, 1, {}, keep=1)
    for layout in ({"tensor": 2, "sequence": True, "expert": 2}, {"distributed_optimizer": True}):
        found, _ = worlds.run(2, go_on, latest_checkpoint(tmp_path), layout, family)
        same(found, trainer.export())
    assert trainer.parallel == UNDIVIDED


def interrupted(root, parallel, family):
    divide_world(ParallelConfig(**parallel))
    first = trainer_of(family, parallel=ParallelConfig(**parallel))
    step(first, 0)
    save_checkpoint(first, root, 1, {}, keep=1)
    results = [step(first, number) for number in (1, 2)]
    second = trainer_of(family, parallel=ParallelConfig(**parallel))
    load_checkpoint(second, latest_checkpoint(root))
    assert [step(second, number) for number in (1, 2)] == results
    return results, second.export(), first.export()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", OTHER_HEAD])
def test_the_head_of_a_pipeline_goes_on_there_and_on_fewer_stages_and_not_on_more(worlds, tmp_path, family):
    (results, resumed, uninterrupted), _ = worlds.run(
        2, interrupted, tmp_path / "stages", {"pipeline": 2}, family
    )
    same(resumed, uninterrupted)
    alone = trainer_of(family)
    load_checkpoint(alone, latest_checkpoint(tmp_path / "stages"))
    for number, result in zip((1, 2), results, strict=True):
        found = step(alone, number)
        assert found.diagnostics["mtp_loss_nats"] == pytest.approx(
            result.diagnostics["mtp_loss_nats"], abs=1e-5
        )
    for name, tensor in alone.export().items():
        assert (tensor - resumed[name]).abs().max() < 1e-4, name
    alone.head.stages = 2
    save_checkpoint(trainer_of(family), tmp_path / "alone", 1, {}, keep=1)
    with pytest.raises(
        ConfigError, match=r"saved with learner\.parallel\.pipeline=1 and a head.*set pipeline to 1"
    ):
        load_checkpoint(alone, latest_checkpoint(tmp_path / "alone"))
