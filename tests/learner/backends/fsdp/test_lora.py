"""Adapters on frozen weights: their steps, their checkpoints, and the policy without them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader

from bus.errors import ConfigError
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.model_loading import load_hf_directory
from learner.checkpoint.commit import load_checkpoint, save_checkpoint
from learner.config.lora import LoraConfig
from learner.config.loss import SFTLoss
from learner.data.packing import pack
from learner.publication.adapter_directory import write_adapter
from storage.disk.checkpoints import latest
from tests.learner.backends.divided_adapters import arrays, published_as
from tests.learner.backends.fsdp.adapter_steps import (
    LENGTHS,
    OPTIMIZER,
    adapters,
    assert_steps_are_those_of_the_formula,
    step,
)
from tests.learner.lora_reference import LINEAR, PEFT, adapt
from tests.learner.tiny import hf_state, random_samples, reference_logits, tiny_model

LORA = LoraConfig(rank=4, alpha=6.0)
DORA = LORA.model_copy(update={"weight_decomposed": True})


def adapted_trainer(
    lora: LoraConfig = LORA, *, model_seed: int = 0, family: str = "qwen3", **settings: object
) -> FsdpTrainer:
    model = tiny_model(family, seed=model_seed)
    torch.manual_seed(7)  # of the adapters
    return FsdpTrainer(model.config, hf_state(model), OPTIMIZER, lora=lora, **settings)


@pytest.mark.parametrize(
    "lora",
    [LORA, LoraConfig(rank=4, alpha=6.0, rank_stabilised=True, targets=("q_proj", "mlp.down_proj"))],
    ids=["all layers", "rank-stabilised"],
)
def test_steps_are_those_of_the_formula(lora):
    trainer, model = adapted_trainer(lora), tiny_model()
    ends = LINEAR if not lora.targets else ("q_proj", "down_proj")
    begun = adapters(trainer)
    assert len(begun) == 2 * 2 * len(ends)  # A and B, layers
    assert all(any(f".{end}." in name for end in ends) for name in begun)
    assert all((".lora_B." in name) == (not tensor.any()) for name, tensor in begun.items())
    scale = 6.0 / (2.0 if lora.rank_stabilised else 4.0)
    assert_steps_are_those_of_the_formula(trainer, model, begun, scale)


def test_exported_weights_are_what_the_adapters_make_of_the_frozen_ones():
    trainer = adapted_trainer()
    step(trainer, 0)
    before, after, found = hf_state(tiny_model()), trainer.export(), adapters(trainer)
    assert after.keys() == before.keys()
    for name, weight in before.items():
        module = PEFT + name.removesuffix(".weight")
        wanted = weight
        if f"{module}.lora_A.weight" in found:
            b, a = found[f"{module}.lora_B.weight"], found[f"{module}.lora_A.weight"]
            wanted = weight + 1.5 * (b @ a)
            assert not torch.equal(after[name], weight)
        assert torch.equal(after[name], wanted), name
    plain = FsdpTrainer(trainer.hf_config, after, OPTIMIZER)
    packs = pack(random_samples(LENGTHS), 56)
    for ours, theirs in zip(trainer.logprobs(packs), plain.logprobs(packs), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen2"])  # without biases, and with some
def test_steps_with_lengths_of_rows_are_those_of_the_formula(family):
    trainer, model = adapted_trainer(DORA, family=family), tiny_model(family)
    begun = adapters(trainer)
    assert len(begun) == 3 * 2 * len(LINEAR)
    for name, weight in hf_state(model).items():
        if (magnitude := PEFT + name.replace("weight", "lora_magnitude_vector")) in begun:
            assert torch.allclose(begun[magnitude], weight.norm(dim=1))
    packs = pack(random_samples(LENGTHS), 56)
    plain = FsdpTrainer(trainer.hf_config, hf_state(model), OPTIMIZER)
    for ours, theirs in zip(trainer.logprobs(packs), plain.logprobs(packs), strict=True):
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num()), "it begins as the model, to the bit"
    assert_steps_are_those_of_the_formula(trainer, model, begun, 1.5)
    plain = FsdpTrainer(trainer.hf_config, trainer.export(), OPTIMIZER)
    for ours, theirs in zip(trainer.logprobs(packs), plain.logprobs(packs), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5, equal_nan=True), "merged weights compute the same"


def test_the_lengths_of_rows_are_as_exact_in_bfloat16_as_their_changes():
    """A length has three digits in bfloat16: rounded to it, the policy would not begin as the model."""
    trainer, model = adapted_trainer(DORA, dtype=torch.bfloat16), tiny_model()
    plain = FsdpTrainer(model.config, hf_state(model), OPTIMIZER, dtype=torch.bfloat16)
    packs = pack(random_samples(LENGTHS), 56)
    for ours, theirs in zip(trainer.logprobs(packs), plain.logprobs(packs), strict=True):
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
    exported = trainer.exported()
    found = exported.here | {name: tensor.clone() for name, tensor in exported.rest()}
    assert {name: tensor.dtype for name, tensor in found.items()} == dict(exported.exact)
    lengths = {name: tensor for name, tensor in found.items() if name.endswith("lora_magnitude_vector")}
    assert {tensor.dtype for tensor in lengths.values()} == {torch.float32}
    assert len(lengths) == 2 * len(LINEAR)


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize("lora", [LORA, DORA], ids=["plain", "with lengths of rows"])
@pytest.mark.parametrize("publish", ["adapter", "merged"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_published_is_the_adapters_alone_or_merged_weights(publish, dtype, lora):
    trainer = adapted_trainer(lora.model_copy(update={"publish": publish}), dtype=dtype)
    step(trainer, 0)
    exported = trainer.exported()
    found = exported.here | {name: tensor.clone() for name, tensor in exported.rest()}
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == dict(exported.shapes)
    wanted = adapters(trainer) if publish == "adapter" else trainer.export()
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        if name.endswith("lora_magnitude_vector"):  # the lengths with which it computes
            assert torch.allclose(tensor, wanted[name], rtol=0, atol=1e-4)
        else:
            assert torch.equal(tensor, wanted[name].to(dtype))
    if publish == "adapter":
        assert set(exported.exact.values()) == {dtype, torch.float32} if lora is DORA else {dtype}


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize("lora", [LORA, DORA], ids=["plain", "with lengths of rows"])
def test_the_reference_is_the_policy_without_its_adapter_and_takes_no_second_model(lora):
    trainer, model = adapted_trainer(lora), tiny_model()
    packs = pack(random_samples(LENGTHS), 56)
    begun = trainer.logprobs(packs)
    step(trainer, 0)
    trainer.frozen.load("reference", model.config, hf_state(model), Path("elsewhere"))
    changed = trainer.logprobs(packs)
    with trainer.frozen.in_place("reference"):
        reference = trainer.logprobs(packs)
    assert not any(torch.allclose(a, b, equal_nan=True) for a, b in zip(begun, changed, strict=True))
    assert all(torch.allclose(a, b, 0, 0, equal_nan=True) for a, b in zip(begun, reference, strict=True))
    again = trainer.logprobs(packs)
    assert all(torch.allclose(a, b, 0, 0, equal_nan=True) for a, b in zip(again, changed, strict=True))
    [held] = trainer.frozen.weights("reference")
    assert len(held) == len(adapters(trainer))


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize("lora", [LORA, DORA], ids=["plain", "with lengths of rows"])
def test_a_run_goes_on_from_a_checkpoint_of_the_adapters_to_the_bit(tmp_path, lora):
    trainer = adapted_trainer(lora)
    trainer.frozen.hold("reference")
    step(trainer, 0)
    save_checkpoint(trainer, tmp_path, 1, {}, keep=1)
    restored = adapted_trainer(lora)
    load_checkpoint(restored, latest(tmp_path))
    assert step(restored, 1) == step(trainer, 1)
    ours, theirs = adapters(restored), adapters(trainer)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert restored.frozen.own == {"reference"}
    saved = FileSystemReader(latest(tmp_path)).read_metadata().state_dict_metadata
    parts = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq", "policies.reference")
    names = [name.replace("lora_magnitude_vector", "lora_magnitude_change") for name in ours]
    assert saved.keys() == {"rng.0.cpu", *(f"{part}.{name}" for part in parts for name in names)}
    with pytest.raises(ConfigError, match="adapters alone"):
        load_hf_directory(latest(tmp_path))


@pytest.mark.slow
def test_a_checkpoint_of_other_adapters_or_another_model_is_refused(tmp_path):
    save_checkpoint(adapted_trainer(), tmp_path, 1, {}, keep=1)
    others = {
        "learner.lora.alpha=6.0: keep": adapted_trainer(LORA.model_copy(update={"alpha": 1.0})),
        "adapters of a model with other weights": adapted_trainer(model_seed=1),
        "learner.lora.experts=False, learner.lora.rank=4": adapted_trainer(LoraConfig()),
        "learner.lora.weight_decomposed=False: keep": adapted_trainer(DORA),
    }
    for message, trainer in others.items():
        with pytest.raises(ConfigError, match=message):
            load_checkpoint(trainer, latest(tmp_path))


def test_a_target_that_no_layer_is_named_by_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="named 'query'; there are down_proj, gate_proj, k_proj"):
        adapted_trainer(LoraConfig(rank=2, targets=("q_proj", "query")))
    with pytest.raises(ConfigError, match="named 'lm_head'"):  # the output layer is fused with the loss
        adapted_trainer(LoraConfig(rank=2, targets=("lm_head",)))


@pytest.mark.slow
def test_frozen_weights_of_bfloat16_take_half_the_memory_and_adapters_learn():
    wide, trainer = adapted_trainer(), adapted_trainer(dtype=torch.bfloat16)
    assert trainer.size_bytes == wide.size_bytes // 2
    samples = random_samples(LENGTHS)
    losses = [trainer.train_step(pack(samples, 100), SFTLoss(), policy_version=0).loss for _ in range(6)]
    assert losses[-1] < losses[0]
    assert {tensor.dtype for tensor in adapters(trainer).values()} == {torch.float32}


def steps_of_ranks(
    lora: LoraConfig,
) -> tuple[list[tuple[float, float]], dict[str, np.ndarray], dict[str, np.ndarray]]:
    trainer = adapted_trainer(lora)
    steps = [step(trainer, number) for number in range(3)]
    weights = arrays(trainer.export().items())
    merged = published_as("merged", trainer)
    assert merged.keys() == weights.keys()
    assert all((merged[name] == weight).all() for name, weight in weights.items())
    return steps, published_as("adapter", trainer), weights


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize("targets", [(), ("self_attn.q_proj", "down_proj")], ids=["all layers", "some"])
@pytest.mark.parametrize("lora", [LORA, DORA], ids=["plain", "with lengths of rows"])
def test_an_adapter_is_written_as_peft_names_and_describes_it(tmp_path, targets, lora):
    trainer = adapted_trainer(lora.model_copy(update={"targets": targets, "rank_stabilised": bool(targets)}))
    step(trainer, 0)
    write_adapter(tmp_path, trainer.adapters, adapters(trainer), "a/model")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config == {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "a/model",
        "r": 4, "lora_alpha": 6, "lora_dropout": 0.0, "use_rslora": bool(targets), "use_dora": lora is DORA,
        "bias": "none",
        "target_modules": list(targets) or sorted(LINEAR), "fan_in_fan_out": False, "inference_mode": True,
    }  # fmt: skip
    found = load_file(tmp_path / "adapter_model.safetensors")
    assert found.keys() == adapters(trainer).keys()
    model, samples = tiny_model(), random_samples(LENGTHS)
    adapt(model, found, 3.0 if targets else 1.5)
    [batch] = pack(samples, 200)
    [[logprobs, _]] = trainer.logprobs([batch])
    with torch.no_grad():
        wanted = torch.log_softmax(reference_logits(model, samples), -1).gather(-1, batch.labels[:, None])
    assert (wanted[:, 0] - logprobs)[batch.loss_mask].abs().max() < 1e-5


@pytest.mark.first(1, others=pytest.mark.nightly)
@pytest.mark.slow
@pytest.mark.parametrize("lora", [LORA, DORA], ids=["plain", "with lengths of rows"])
def test_two_ranks_train_the_same_adapters_as_one(worlds, lora):
    (steps, published, weights), (_, *nothing) = worlds.run(2, steps_of_ranks, lora)
    assert nothing == [{}, {}]
    alone, expected_published, expected = steps_of_ranks(lora)
    for found, wanted in zip(steps, alone, strict=True):
        assert found == pytest.approx(wanted, abs=1e-5)
    for ours, theirs in ((published, expected_published), (weights, expected)):
        assert ours.keys() == theirs.keys()
        assert all(np.abs(ours[name] - weight).max() < 1e-5 for name, weight in theirs.items())
