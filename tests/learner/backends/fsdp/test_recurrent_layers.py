"""Layers that take a state from token to token: packed sequences are as transformers computes each alone."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bus.errors import ConfigError
from learner.backends.fsdp import build
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.checkpoint.commit import load_checkpoint, save_checkpoint
from learner.config.lora import LoraConfig
from learner.config.parallel import ParallelConfig
from learner.data.packing import pack
from storage.disk.checkpoints import latest
from tests.learner.backends.fsdp.adapter_steps import (
    OPTIMIZER,
    adapters,
    assert_steps_are_those_of_the_formula,
    step,
)
from tests.learner.backends.fsdp.families import RECURRENT_FAMILIES, family_config, family_model
from tests.learner.tiny import hf_state, random_samples, reference_logits

OVER_CHUNKS = [1, 150, 3, 64, 2, 65, 130, 4, 71]
"""The kernel computes 64 tokens at a time, and the convolution looks at 4."""
LINEAR = {
    "in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj",
    "down_proj",
}  # fmt: skip


def trainer_of(family: str = "qwen3_next", **settings: object) -> FsdpTrainer:
    model = family_model(family)
    torch.manual_seed(7)  # of adapters
    return FsdpTrainer(model.config, hf_state(model), OPTIMIZER, **settings)


@pytest.mark.first(2, others=pytest.mark.nightly)
@pytest.mark.parametrize(
    "family",
    [pytest.param(n, marks=() if n == "qwen3_next" else pytest.mark.slow) for n in RECURRENT_FAMILIES],
)
def test_logprobs_and_gradients_of_a_pack_are_those_of_each_sequence_alone(family):
    model, trainer, samples = family_model(family), trainer_of(family), random_samples(OVER_CHUNKS)
    [batch] = pack(samples, 1000)
    [[logprobs, _]] = trainer.logprobs([batch])
    logits = reference_logits(model, samples)
    wanted = torch.log_softmax(logits, -1).gather(-1, batch.labels[:, None])[:, 0]
    assert (wanted - logprobs)[batch.loss_mask].abs().max() < 1e-5
    wanted[batch.loss_mask].mean().backward()
    found, _ = trainer.model(batch)
    found.mean().backward()
    gradients = {
        name: parameter.grad.full_tensor() for name, parameter in trainer.model.hf.named_parameters()
    }
    for name, parameter in model.named_parameters():
        bound = 1e-5 * max(1.0, parameter.grad.abs().max().item())
        assert (gradients[name] - parameter.grad).abs().max() < bound, name


def test_a_state_that_went_on_over_sequences_would_be_refused(monkeypatch):
    monkeypatch.setattr(build, "begin_anew", lambda _: None)
    with pytest.raises(ConfigError, match=r"log-probs in a pack are up to .* nats from transformers' own"):
        trainer_of()


def test_linear_attention_that_nobody_has_read_is_refused_by_name():
    config = family_config("qwen3_next")
    config.model_type = "another"
    with pytest.raises(ConfigError, match="layer_types: linear_attention would mix the sequences"):
        FsdpTrainer(config, {}, OPTIMIZER)


@pytest.mark.parametrize(
    "family",
    [pytest.param(n, marks=() if n == "qwen3_next" else pytest.mark.slow) for n in RECURRENT_FAMILIES],
)
def test_published_weights_are_the_files_of_transformers_to_the_bit(tmp_path: Path, family):
    family_model(family).save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    published = trainer_of(family).export()
    assert published.keys() == files.keys()
    assert all(torch.equal(published[name], tensor) for name, tensor in files.items())


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_to_the_bit_also_where_layers_are_computed_again(tmp_path):
    trainer = trainer_of()
    step(trainer, 0)
    save_checkpoint(trainer, tmp_path, 1, {}, keep=1)
    restored = trainer_of(parallel=ParallelConfig(recompute="full"))
    load_checkpoint(restored, latest(tmp_path))
    assert step(restored, 1) == step(trainer, 1)
    weights = trainer.export()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in restored.export().items())


def steps_of_ranks(lora: LoraConfig) -> tuple[list[tuple[float, float]], dict[str, np.ndarray]]:
    trainer = trainer_of(lora=lora)
    steps = [step(trainer, number) for number in range(3)]
    return steps, {name: tensor.numpy() for name, tensor in trainer.export().items()}


@pytest.mark.first(1, others=pytest.mark.nightly)
@pytest.mark.slow
@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=4)], ids=["weights", "adapters"])
def test_two_ranks_train_as_one(worlds, lora):
    steps, weights = worlds.run(2, steps_of_ranks, lora)[0]
    alone, expected = steps_of_ranks(lora)
    for found, wanted in zip(steps, alone, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-5)
    assert all(np.abs(weights[name] - tensor).max() < 1e-5 for name, tensor in expected.items())


@pytest.mark.slow
def test_adapters_of_all_linear_layers_follow_the_formula():
    trainer, model = trainer_of(lora=LoraConfig(rank=4, alpha=6.0)), family_model("qwen3_next")
    begun = adapters(trainer)
    assert {name.split(".lora_")[0].rsplit(".", 1)[1] for name in begun} == LINEAR
    assert_steps_are_those_of_the_formula(trainer, model, begun, 1.5, rel=1e-5)
