"""The main weights that a rank updates: parts of which parameters they are, and how they are lent."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bus.errors import ConfigError
from learner.backends.megatron.core.megatron_core import (
    DistributedDataParallel,
    DistributedOptimizer,
    MegatronOptimizer,
)
from learner.config.optimizer import OptimizerConfig


class MainShard(NamedTuple):
    """This rank's part of a parameter."""

    parameter: Any
    """Parameter of the model."""
    main: Tensor
    """float32, the main weights, which the optimizer updates: some of the parameter's or all of them."""
    start: int
    """Element of the parameter at which the weights begin."""


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


@contextmanager
def lent_weights(
    optimizer: MegatronOptimizer, config: OptimizerConfig, chunks: Sequence[DistributedDataParallel]
) -> Iterator[dict[str, Tensor]]:
    """Lend this rank's parts by megatron-core's names, of chunk n of several as `n.NAME`; what was changed in
    them is then computed with. Every rank calls this.

    Raises `ConfigError` where some of them are not on the device."""
    if config.offload:
        raise ConfigError(
            f"learner.optimizer.offload={config.offload} keeps weights on the host, which no hook gets: set "
            "it to 0, or leave out the hook's parameter `model`"
        )
    parts = optimizer.chained_optimizers
    filled = [part for part in parts if not getattr(part, "is_stub_optimizer", False)]
    mains = {shard.parameter: shard.main for part in filled for shard in main_shards(part)}
    found: dict[str, Tensor] = {}
    for number, chunk in enumerate(chunks):
        prefix = f"{number}." if len(chunks) > 1 else ""
        for name, parameter in chunk.module.named_parameters():
            if parameter.requires_grad and parameter in mains:
                found[f"{prefix}{name}"] = mains[parameter].data
    yield found
    with torch.no_grad():  # the optimizer's parts are views made so, which torch refuses to change otherwise
        for part in parts:
            if hasattr(part, "_copy_main_params_to_model_params"):  # else mains are the parameters
                part._copy_main_params_to_model_params()
    if any(isinstance(part, DistributedOptimizer) for part in parts):
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)
