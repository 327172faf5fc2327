"""Steps of adapters beside their formula."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.megatron.trainer import Trainer
from learner.config.optimizer import OptimizerConfig
from learner.data.packing import pack
from tests.learner.lora_reference import adapt, tensors_of
from tests.learner.reference import reference_optimizer, reference_step
from tests.learner.tiny import TIS, random_samples

LENGTHS = [5, 17, 2, 32, 9, 20, 20, 3]
OPTIMIZER = OptimizerConfig(lr=1e-2, warmup_steps=3, weight_decay=0.1, eps=1e-4)


def adapters(trainer: FsdpTrainer | Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.adapters.streamed()}


def step(trainer: FsdpTrainer | Trainer, number: int) -> tuple[float, float]:
    samples = random_samples(LENGTHS, seed=number)[dist.get_rank() :: dist.get_world_size()]
    result = trainer.train_step(pack(samples, 56), TIS, policy_version=3)
    return result.loss, result.grad_norm


def assert_steps_are_those_of_the_formula(
    trainer: FsdpTrainer | Trainer, model: PreTrainedModel, begun: dict[str, Tensor], scale: float,
    *, rel: float = 1e-6,
) -> None:  # fmt: skip
    """Train both from the adapters `begun`; losses and norms of gradients may differ by a part of `rel`."""
    expected = adapt(model, begun, scale)
    optimizer = reference_optimizer(model, OPTIMIZER)
    for number in range(3):
        lr = OPTIMIZER.lr * min(1.0, (number + 1) / 3)
        wanted = reference_step(model, optimizer, random_samples(LENGTHS, seed=number), loss="tis", lr=lr)
        assert step(trainer, number) == pytest.approx(wanted, rel=rel, abs=1e-5)
    found = adapters(trainer)
    for name, tensor in tensors_of(expected).items():
        assert (found[name] - tensor).abs().max() < 1e-5, name
        moved = not torch.equal(found[name], begun[name])
        assert moved != torch.equal(tensor, begun[name]), name
        assert moved or ".experts." in name  # one that no token was sent to
