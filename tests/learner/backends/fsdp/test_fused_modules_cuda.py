"""Fused parts of transformers' models on a GPU: `pytest -m gpu tests/learner`."""

import pytest
import torch

from learner.backends.fsdp import model
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.config.lora import LoraConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.data.packing import pack
from tests.learner.backends.fsdp.families import FAMILIES, family_model
from tests.learner.tiny import TIS, hf_state, random_samples

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
LENGTHS = [5, 17, 2, 32, 9, 20, 20, 3]


def steps(family, **settings):
    """Return loss and gradient norm of three steps, and the parts that are fused."""
    hf_model = family_model(family)
    torch.manual_seed(0)
    trainer = FsdpTrainer(hf_model.config, hf_state(hf_model), OptimizerConfig(lr=1e-3), **settings)
    packs = [pack(random_samples(LENGTHS, seed=seed), 40) for seed in range(3)]
    results = [trainer.train_step(batches, TIS, policy_version=3) for batches in packs]
    return [(each.loss, each.grad_norm) for each in results], trainer.model.fused


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_a_family_are_those_of_transformers_modules(family, monkeypatch):
    """In float32: in bfloat16 routers choose other experts after another rounding."""
    found, fused = steps(family)
    assert fused.norms
    monkeypatch.setattr(model, "are_wanted", lambda: False)
    expected, fused = steps(family)
    assert fused is None
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"parallel": ParallelConfig(recompute="full")},
        {"lora": LoraConfig(rank=4, weight_decomposed=True)},
    ],
    ids=["plain", "recomputed", "adapters"],
)
@pytest.mark.parametrize("family", ["llama with scaled rope", "gemma3"])
def test_steps_in_bfloat16_are_near_those_of_transformers_modules(family, settings, monkeypatch):
    found, _ = steps(family, dtype=torch.bfloat16, **settings)
    monkeypatch.setattr(model, "are_wanted", lambda: False)
    expected, _ = steps(family, dtype=torch.bfloat16, **settings)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=0.05, abs=0.02)


def test_memory_that_torch_keeps_for_later_is_free():
    size, near = 2**28, 2**25
    before = model.free_bytes()
    taken = torch.empty(size, dtype=torch.uint8, device="cuda")
    assert before - model.free_bytes() == pytest.approx(size, abs=near)
    del taken
    assert model.free_bytes() == pytest.approx(before, abs=near)
