"""Adapters that are trained alone and by several ranks."""

from functools import cache

import numpy as np
import pytest
import torch

from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.megatron.trainer import Trainer
from learner.config.lora import LoraConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import UNDIVIDED, ParallelConfig
from learner.data.packing import pack
from tests.learner.division import divide_world
from tests.learner.tiny import TIS, hf_state, random_samples, tiny_model

LENGTHS = [5, 17, 2, 32, 9, 20, 20, 3]
OPTIMIZER = OptimizerConfig(lr=1e-2, warmup_steps=3, weight_decay=0.1, eps=1e-4)
BACKENDS = {"megatron": Trainer, "fsdp": FsdpTrainer}


def trainer_of(
    backend: str, lora: LoraConfig, parallel: ParallelConfig = UNDIVIDED, *,
    dtype: torch.dtype = torch.float32, **model: object,
):  # fmt: skip
    built = tiny_model(**{"tied": True, **model})
    torch.manual_seed(7)  # of the adapters
    settings = {"lora": lora, "parallel": parallel, "dtype": dtype}
    return BACKENDS[backend](built.config, hf_state(built), OPTIMIZER, **settings)


def step(trainer, number: int) -> tuple[float, float]:
    ranks = trainer.data_parallel_group
    samples = random_samples(LENGTHS, seed=number)[ranks.rank() :: ranks.size()]
    result = trainer.train_step(pack(samples, 56), TIS, policy_version=3)
    return result.loss, result.grad_norm


def arrays(tensors) -> dict[str, np.ndarray]:
    return {name: tensor.cpu().clone().numpy() for name, tensor in tensors}


def trained(backend: str, lora: LoraConfig, parallel: ParallelConfig = UNDIVIDED, **model: object):
    """Return losses and norms of three steps, the adapters, the weights that they make, and log-probs."""
    trainer = trainer_of(backend, lora, parallel, **model)
    steps = [step(trainer, number) for number in range(3)]
    exported = trainer.exported()
    published = arrays(exported.here.items()) | arrays(exported.rest())
    adapters, weights = arrays(trainer.adapters.streamed()), arrays(trainer.export().items())
    wanted = adapters if lora.publish == "adapter" else weights
    assert published.keys() == wanted.keys()
    assert all((published[name] == each).all() for name, each in wanted.items())
    return steps, adapters, weights


@cache
def trained_alone(backend: str, lora: LoraConfig, **model: object):
    """Return what `trained` does on one rank, to all layouts that are compared with it."""
    return trained(backend, lora, **model)


def divided(layout: dict[str, object], lora: LoraConfig, model: dict[str, object]):
    """Train on this rank of a world that is divided so."""
    parallel = ParallelConfig.model_validate(layout)
    divide_world(parallel)
    return trained("megatron", lora, parallel, **model)


def assert_same(ours, theirs):
    for found, expected in zip(ours[0], theirs[0], strict=True):
        assert found == pytest.approx(expected, abs=1e-5)
    for found, expected in zip(ours[1:], theirs[1:], strict=True):
        assert found.keys() == expected.keys()
        assert max(np.abs(found[name] - each).max() for name, each in expected.items()) < 1e-5
