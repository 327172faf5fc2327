"""Families, adapters and Muon on a GPU, against what the CPU computes: `pytest -m gpu tests/learner`."""

import pytest
import torch

from learner.backends.megatron.trainer import Trainer
from learner.config.lora import LoraConfig
from learner.config.optimizer import OptimizerConfig
from learner.data.packing import pack
from tests.learner.backends import test_lora_backends, test_muon
from tests.learner.reference import reference_optimizer, reference_step
from tests.learner.tiny import FAMILIES, TIS, hf_state, random_samples, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
LENGTHS = [5, 17, 2, 32, 9, 20, 20, 3]
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-4)
PUBLISHED_WIDTHS = {
    "family": "deepseek_v3", "hidden_size": 512, "q_lora_rank": 256, "kv_lora_rank": 128,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip


def steps_of_both(dtype: torch.dtype = torch.float32, **model: object):
    """Return loss and norm of each of four steps on the GPU, and of transformers' on the CPU."""
    reference = tiny_model(**model)
    trainer = Trainer(reference.config, hf_state(reference), OPTIMIZER, dtype=dtype)
    optimizer = reference_optimizer(reference, OPTIMIZER)
    found, expected = [], []
    for number in range(4):
        samples = random_samples(LENGTHS, seed=number)
        result = trainer.train_step(pack(samples, 40), TIS, policy_version=3)
        found.append((result.loss, result.grad_norm))
        expected.append(reference_step(reference, optimizer, samples, loss="tis", lr=OPTIMIZER.lr))
    return found, expected


@pytest.mark.parametrize("family", FAMILIES)
def test_four_steps_are_those_of_transformers_on_a_cpu(family):
    for found, expected in zip(*steps_of_both(family=family), strict=True):
        assert found == pytest.approx(expected, abs=5e-5)


def test_latent_attention_as_wide_as_deepseeks_is_near_in_bfloat16():
    """Queries of 192 and values of 128 columns a head, which the kernel for any lengths takes padded."""
    for found, expected in zip(*steps_of_both(torch.bfloat16, **PUBLISHED_WIDTHS), strict=True):
        assert found == pytest.approx(expected, rel=0.05, abs=0.02)


def test_muon_follows_its_papers():
    steps, weights = test_muon.train({}, {})
    expected_steps, expected = test_muon.reference(())
    for found, wanted in zip(steps, expected_steps, strict=True):
        assert found == pytest.approx(wanted, abs=1e-4)
    for name, weight in weights.items():
        assert (weight.cpu() - expected[name]).abs().max() < 1e-4, name


def test_each_step_of_adapters_is_the_same_on_both_backends():
    lora = LoraConfig(rank=4, alpha=6.0)
    ours, theirs = (test_lora_backends.trained(backend, lora)[0] for backend in ("megatron", "fsdp"))
    for found, expected in zip(ours, theirs, strict=True):
        assert found == pytest.approx(expected, abs=5e-5)
