"""Tells which backend trains: the only module outside learner/backends/megatron that names one."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PretrainedConfig

from learner.backends.base import Backend
from learner.backends.megatron import process_groups
from learner.backends.megatron.conversion.families import family_of
from learner.backends.megatron.conversion.torch_dist import MegatronWeights, is_checkpoint
from learner.backends.megatron.trainable import TrainableWeights
from learner.backends.megatron.trainer import Trainer
from learner.config.model import ModelConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import UNDIVIDED, ParallelConfig, WorldConfig
from learner.lazy_weights import State

BACKENDS: dict[str, Callable[..., Backend]] = {"megatron": Trainer}
"""Each takes (hf_config, state, optimizer, dtype=, parallel=, trainable=)."""


def init_world(
    parallel: ParallelConfig = UNDIVIDED, timeout_s: float = WorldConfig().collective_timeout_s
) -> None:
    """Join the world that torchrun describes in the environment, divided as `parallel` says.

    `timeout_s` bounds each collective. Raises `ConfigError` when the world cannot be divided so, before it
    waits for anybody.
    """
    process_groups.init_world(parallel, timeout_s)


def close_world() -> None:
    """Leave the world; `init_world` may be called again."""
    process_groups.close_world()


def build_backend(
    model: ModelConfig, hf_config: PretrainedConfig, state: State, optimizer: OptimizerConfig,
    parallel: ParallelConfig,
) -> Backend:  # fmt: skip
    """Return the backend with a model that has the weights `state`, in the world that `init_world`
    divided."""
    return BACKENDS["megatron"](
        hf_config,
        state,
        optimizer,
        dtype=getattr(torch, model.dtype),
        parallel=parallel,
        trainable=TrainableWeights(model.freeze, model.train_only),
    )


def checkpoint_weights(directory: Path, hf_config: PretrainedConfig) -> State | None:
    """Open the weights of a checkpoint that a backend wrote; None where `directory` is none.

    Raises `StorageError` when its metadata is unreadable or lacks a tensor.
    """
    if not is_checkpoint(directory):
        return None
    family = family_of(hf_config)
    shape = family.shape(hf_config)
    return MegatronWeights(directory, list(family.rules(shape)), shape)
