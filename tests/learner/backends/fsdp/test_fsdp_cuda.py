"""The FSDP2 backend on a GPU: `pytest -m gpu tests/learner`."""

import pytest
import torch

from learner.checkpoint.commit import load_checkpoint, save_checkpoint
from learner.config.loss import SFTLoss
from learner.config.parallel import ParallelConfig
from learner.data.packing import pack
from storage.disk.checkpoints import latest
from tests.learner.backends.fsdp import fsdp_steps
from tests.learner.backends.fsdp.fsdp_steps import LENGTHS, OPTIMIZER, trained
from tests.learner.tiny import TIS, random_samples

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama"])
def test_each_step_is_megatrons_in_float32(family):
    ours, theirs = (trained(backend, family) for backend in ("fsdp", "megatron"))
    for found, expected in zip(ours[0], theirs[0], strict=True):
        assert found == pytest.approx(expected, abs=2e-5)
    for name, weight in theirs[1].items():
        assert (ours[1][name] - weight).abs().max() < 2e-5, name


def test_each_step_is_near_megatrons_in_bfloat16():
    """Both round activations, each in places of its own; experts would change with them."""
    ours, theirs = (trained(backend, "qwen3", dtype=torch.bfloat16)[0] for backend in ("fsdp", "megatron"))
    for found, expected in zip(ours, theirs, strict=True):
        assert found == pytest.approx(expected, rel=0.03, abs=0.01)


@pytest.mark.parametrize(
    "settings", [{"parallel": ParallelConfig(recompute="full")}, {}], ids=["recomputed", "offloaded"]
)
def test_memory_is_saved_without_other_results_on_a_gpu(settings, monkeypatch):
    steps, weights, _ = trained("fsdp", "qwen3", dtype=torch.bfloat16)
    if not settings:
        offloaded = OPTIMIZER.model_copy(update={"offload": 1.0})
        monkeypatch.setattr(fsdp_steps, "OPTIMIZER", offloaded)
    found, saved, _ = trained("fsdp", "qwen3", dtype=torch.bfloat16, **settings)
    assert found[0] == pytest.approx(steps[0], abs=1e-3)
    for step, expected in zip(found, steps, strict=True):  # AdamW of the host rounds differently
        assert step == pytest.approx(expected, abs=1e-2)
    for name, weight in weights.items():  # Adam's first steps are as large as lr, whatever the gradient
        assert (saved[name].float() - weight.float()).abs().mean() < 1e-3, name


def test_a_run_from_a_gpu_goes_on_as_if_nothing_had_been(tmp_path):
    def steps(trainer, numbers):
        packs = [pack(random_samples(LENGTHS, seed=number), 40) for number in numbers]
        return [trainer.train_step(batches, TIS, policy_version=3).loss for batches in packs]

    *_, trainer = trained("fsdp", "qwen3", 1, dtype=torch.bfloat16)
    save_checkpoint(trainer, tmp_path, 1, {}, keep=1)
    on = steps(trainer, range(1, 4))
    *_, restored = trained("fsdp", "qwen3", 0, dtype=torch.bfloat16)
    load_checkpoint(restored, latest(tmp_path))
    assert steps(restored, range(1, 4)) == on


def test_demonstrations_are_learned_in_bfloat16_on_a_gpu():
    *_, trainer = trained("fsdp", "qwen3", 0, dtype=torch.bfloat16)
    samples = random_samples(LENGTHS)
    losses = [trainer.train_step(pack(samples, 100), SFTLoss(), policy_version=0).loss for _ in range(8)]
    assert losses[-1] < losses[0] - 0.1
