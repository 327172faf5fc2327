"""The update decides on the device: whether to clip, and whether to leave everything as it is."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from learner.backends.megatron.core.ddp import LINEAR
from learner.backends.megatron.trainer import Trainer
from learner.backends.shared.multi_tensor import ROW, norm
from learner.config.optimizer import OptimizerConfig
from learner.data.packing import pack
from tests.learner.backends.asked_questions import Questions
from tests.learner.tiny import TIS, hf_state, random_samples, tiny_model

LENGTHS = [5, 17, 2, 32, 9]


def trainer_of(model, **optimizer):
    return Trainer(model.config, hf_state(model), OptimizerConfig(lr=1e-3, weight_decay=0.1, **optimizer))


def step(trainer, samples):
    return trainer.train_step(pack(samples, 40), TIS, policy_version=3)


def states(trainer):
    parts = trainer.optimizer.chained_optimizers
    return [values for part in parts for values in part.optimizer.state.values()]


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_the_host_asks_the_device_for_nothing_before_the_step_is_queued(state_dtype):
    trainer = trainer_of(tiny_model(), state_dtype=state_dtype)
    with Questions() as questions:
        assert not step(trainer, random_samples(LENGTHS)).skipped
    assert not questions.asked, questions.asked[0]


def test_a_question_would_be_noticed():
    with Questions() as questions:
        bool(torch.ones(1) > 0)
    assert questions.asked


@pytest.mark.parametrize("clip_grad", [0.01, 1e3, math.inf])
def test_the_moments_see_the_clipped_mean_gradient(clip_grad):
    trainer = trainer_of(tiny_model(), clip_grad=clip_grad)
    result = step(trainer, random_samples(LENGTHS))
    means = [values["exp_avg"].flatten() for values in states(trainer)]
    seen = torch.cat(means).norm().item() / (1 - trainer.optimizer_config.beta1)
    assert 0.01 < result.grad_norm < 1e3
    assert seen == pytest.approx(min(result.grad_norm, clip_grad), rel=1e-4)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_skipped_step_leaves_moments_and_step_counts_alone(state_dtype, bad):
    trainer = trainer_of(tiny_model(), state_dtype=state_dtype)
    samples = random_samples(LENGTHS)
    step(trainer, samples)
    before = [{name: value.clone() for name, value in values.items()} for values in states(trainer)]
    poisoned = dataclasses.replace(samples[0].with_streams(advantages=bad), loss_mask=np.ones(5, bool))
    assert step(trainer, [poisoned]).skipped
    for old, new in zip(before, states(trainer), strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)


def test_a_step_without_trained_tokens_is_skipped_and_is_no_failure():
    trainer = trainer_of(tiny_model())
    before = trainer.export()
    untrained = dataclasses.replace(random_samples([5])[0], loss_mask=np.zeros(5, bool))
    result = step(trainer, [untrained])
    assert (result.skipped, result.loss, result.grad_norm) == (True, 0.0, 0.0)
    assert trainer.counts.not_finite_in_a_row == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.export().items())


def test_products_add_to_the_gradient_what_autograd_would_add():
    def gradients(fused):
        trainer = trainer_of(tiny_model(), clip_grad=math.inf)
        for module in trainer.model.modules():
            if isinstance(module, LINEAR):
                module.gradient_accumulation_fusion = fused
        step(trainer, random_samples(LENGTHS))
        return {name: p.main_grad.clone() for name, p in trainer.model.named_parameters()}

    apart = gradients(fused=False)
    for name, gradient in gradients(fused=True).items():
        assert gradient.any()
        assert torch.allclose(gradient, apart[name], atol=1e-6), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_many_gradients_is_that_of_float64(dtype):
    torch.manual_seed(0)
    sizes = (3, ROW, 3 * ROW + 1, 1 << 22)  # torch alone loses 1e-4 of the last in float32
    tensors = [(torch.randn(size) * torch.rand(size) ** 8).to(dtype) for size in sizes]
    exact = torch.cat([tensor.double() for tensor in tensors]).norm()
    assert float(norm(tensors)) == pytest.approx(float(exact), rel=3e-7)
