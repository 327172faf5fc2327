"""Tokens of a micro-batch on a CPU, and the memory that they are reckoned to take."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from learner.backends.megatron.trainer import Trainer
from learner.config.batch import DEFAULT_TOKENS
from learner.config.learner import LearnerConfig
from learner.config.model import ModelConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.config.process_settings import LearnerSettings
from learner.config.warmup import WarmupConfig
from learner.data.packing import pack
from learner.initial import micro_batch
from learner.initial.micro_batch import LEAST_TOKENS, activation_bytes, fitted
from storage.settings.evaluation import EvaluationConfig
from tests.learner.tiny import hf_state, random_samples, tiny_model

LAPTOP = {
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536,
}  # fmt: skip
"""SmolLM2-135M."""


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_activations_take_the_memory_that_they_are_reckoned_to_take(recompute):
    layers = 8
    model = tiny_model("llama", num_hidden_layers=layers, hidden_size=64, intermediate_size=256)
    trainer = Trainer(
        model.config, hf_state(model), OptimizerConfig(), parallel=ParallelConfig(recompute=recompute)
    )
    [batch] = pack(random_samples([128, 128]), 256)
    kept, weights = {}, {weight.untyped_storage().data_ptr() for weight in trainer.model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # held, so that no other tensor takes its place
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        passed = trainer.model(batch, None)
    each = sum(storage.nbytes() for storage in kept.values()) / 256
    config = model.config.to_dict()
    reckoned = activation_bytes(config, 4, recompute=False)
    if recompute == "full":
        each, reckoned = each + reckoned / layers, activation_bytes(config, 4, recompute=True)
    assert 0.8 < reckoned / each < 1.5
    del passed


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LearnerSettings:
    """Those of a directory's model, on a host of 16 GiB."""
    monkeypatch.setattr(micro_batch, "memory_bytes", lambda: 16 << 30)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **LAPTOP}))
    where = {name: tmp_path / name for name in ("checkpoints", "progress", "lineage", "export")}
    return LearnerSettings(
        model=ModelConfig(path=tmp_path), warmup=WarmupConfig(), learner=LearnerConfig(),
        evaluation=EvaluationConfig(), samples_per_prompt=2, seed=0, model_directory=tmp_path, **where,
    )  # fmt: skip


def test_a_micro_batch_on_a_cpu_fits_its_memory(settings, monkeypatch):
    budget = fitted(settings).learner.batch.token_budget
    assert budget == (16 << 30) // 32 // activation_bytes(LAPTOP, 4, recompute=False) == 364
    monkeypatch.setattr(micro_batch, "memory_bytes", lambda: 1 << 30)
    assert fitted(settings).learner.batch.token_budget == LEAST_TOKENS
    monkeypatch.setattr(micro_batch, "memory_bytes", lambda: 1 << 40)
    assert fitted(settings).learner.batch.token_budget == DEFAULT_TOKENS


def test_a_budget_that_is_set_and_one_of_a_model_from_nothing_stay(settings):
    chosen = LearnerConfig.model_validate({"batch": {"tokens_per_micro_batch": 1000}})
    assert fitted(replace(settings, learner=chosen)).learner.batch.token_budget == 1000
    assert fitted(replace(settings, model=ModelConfig())).learner.batch.token_budget == DEFAULT_TOKENS
    assert fitted(settings).learner.batch.logprob_token_budget == 364
