"""Seconds of the parts of a step, and how much of a GPU it used."""

import time

import pytest
import torch

from learner.backends.fsdp import trainer as fsdp
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.megatron import trainer as megatron
from learner.backends.megatron.trainer import Trainer
from learner.backends.update.step_times import StepTimes
from learner.config.batch import BatchConfig
from learner.config.learner import LearnerConfig
from learner.config.optimizer import OptimizerConfig
from learner.metrics.gpus import GPUS, gpu_named
from learner.metrics.utilisation import utilisation
from learner.step.rl_step import train_on
from tests.learner.tiny import hf_state, tiny_model
from tests.learner.world.ranks_worker import group

LATE_S = 0.2


def late(work):
    def done(*arguments, **named):
        time.sleep(LATE_S)
        return work(*arguments, **named)

    return done


@pytest.mark.parametrize(
    ("backend", "module", "norm"), [(Trainer, megatron, "update_if_finite"), (FsdpTrainer, fsdp, "decide")]
)
def test_what_an_optimizer_takes_counts_as_its_own_in_each_update(monkeypatch, backend, module, norm):
    policy = tiny_model()
    trainer = backend(policy.config, hf_state(policy), OptimizerConfig(lr=1e-2))
    monkeypatch.setattr(module, norm, late(getattr(module, norm)))
    learner = LearnerConfig(batch=BatchConfig(updates=2))
    began = time.monotonic()
    _, result = train_on(trainer, [group(1), group(2)], [1.0, 1.0], learner, step=1, policy_version=4)
    took_s, parts = time.monotonic() - began, result.seconds
    assert parts.keys() == {"logprobs_s", "update_s", "optimizer_s"}
    assert 2 * LATE_S <= parts["optimizer_s"] < parts["update_s"]
    assert 0 <= parts["logprobs_s"] < took_s - parts["update_s"]


def test_gpus_are_known_by_the_names_that_cuda_gives_them():
    named = (
        "NVIDIA H200",
        "NVIDIA H100 80GB HBM3",
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA L40S",
        "NVIDIA GH200 480GB",
    )
    assert [gpu_named(name) for name in named] == [*(GPUS[n] for n in ("h200", "h100", "a100", "l40s")), None]


def test_a_processor_has_no_peak_to_compare_with():
    assert utilisation({"update_s": 1.0}, 1e12) == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_parts_are_timed_by_the_gpu_that_works_while_nobody_waits(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    a, times = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16), StepTimes()
    a @ a  # the first product waits until cuBLAS is loaded
    torch.cuda.synchronize()
    began = time.monotonic()
    with times.part("update_s"):
        for _ in range(20):
            a @ a
    queued_s = time.monotonic() - began
    seconds = times.seconds()
    assert queued_s < seconds["update_s"] / 2
    found = utilisation(seconds, 20 * 2 * 8192**3)
    assert 0.3 < found.get("train/mfu", 0.5) < 1
    assert found["memory/gpu_peak_gib"] >= 2 * 8192**2 * 2 / 2**30
