"""Finds the main weights that a rank updates, and the parameters of the model that they are parts of."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from learner.backends.megatron.core.megatron_core import DistributedOptimizer


class MainShard(NamedTuple):
    """This rank's part of a parameter."""

    parameter: Any
    """Parameter of the model."""
    main: Tensor
    """float32, the main weights, which the optimizer updates: some of the parameter's or all of them."""
    start: int
    """Element of the parameter at which they begin."""


def main_shards(part: Any) -> Iterator[MainShard]:
    """Yield what one of megatron-core's optimizers updates on this rank."""
    if isinstance(part, DistributedOptimizer):
        for parameter, main in _pairs(
            (part.model_float16_groups, part.shard_fp32_from_float16_groups),
            (part.model_fp32_groups, part.shard_fp32_groups),
        ):
            yield MainShard(parameter, main, part._get_model_param_range_map(parameter)["param"].start)
        return
    rounded = getattr(part, "float16_groups", [])  # only where the model's dtype is not float32
    mains = getattr(part, "fp32_from_float16_groups", [])
    exact = getattr(part, "fp32_from_fp32_groups", [group["params"] for group in part.param_groups])
    for parameter, main in _pairs((rounded, mains), (exact, exact)):
        yield MainShard(parameter, main, 0)


def _pairs(*groups: tuple[Any, Any]) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
    for parameters, mains in groups:
        for some, theirs in zip(parameters, mains, strict=True):
            yield from zip(some, theirs, strict=True)
