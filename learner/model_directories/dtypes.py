"""Tells in which dtype the learner computes and publishes, and how large the published weights are."""

from math import prod

import torch

from bus.errors import ConfigError
from learner.config.learner import LearnerConfig
from learner.config.model import ModelConfig
from learner.model_directories.lazy_weights import State, spec_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Dtypes by their names in settings."""


def compute_dtype(model: ModelConfig) -> torch.dtype:
    """Return the dtype of the learner's parameters and activations on this host."""
    if model.dtype != "auto":
        return DTYPES[model.dtype]
    if model.numerics != "fast":
        return torch.float32 if model.numerics == "exact" else torch.bfloat16
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def published_dtype(learner: LearnerConfig, model: ModelConfig) -> torch.dtype:
    """Return the dtype of most published weights.

    Raises `ConfigError` for one that is coarser than that of the learner: engines would sample from other
    weights than the learner computes with, and small updates would reach them late or never."""
    trained = compute_dtype(model)
    if learner.publish_dtype == "auto":
        return trained
    published = DTYPES[learner.publish_dtype]
    if published.itemsize < trained.itemsize:
        raise ConfigError(
            f"learner.publish_dtype={learner.publish_dtype} is coarser than the learner's "
            f"model.dtype={str(trained).removeprefix('torch.')}: engines would have other weights than the "
            "learner. Leave learner.publish_dtype out, or set model.dtype too"
        )
    return published


def published_bytes(state: State, published: torch.dtype) -> int:
    """Return the size in bytes of all weights of `state` in the dtype `published`; only their shapes are
    read."""
    return sum(_elements(state, name) for name in state) * published.itemsize


def _elements(state: State, name: str) -> int:
    try:
        return prod(spec_of(state, name).shape)
    except ConfigError:  # integers, say: no weight, for the model would not have been loaded
        return 0
