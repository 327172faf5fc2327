"""The trained weights as the optimizer has them, lent to a function of the user's own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bus.errors import ConfigError
from learner.backends.megatron.core.megatron_core import (
    DistributedDataParallel,
    DistributedOptimizer,
    MegatronOptimizer,
)
from learner.config.optimizer import OptimizerConfig


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
    found: dict[str, Tensor] = {}
    for number, chunk in enumerate(chunks):
        prefix = f"{number}." if len(chunks) > 1 else ""
        for name, parameter in chunk.module.named_parameters():
            if parameter.requires_grad and (main := _main(optimizer, parameter)) is not None:
                found[f"{prefix}{name}"] = main
    yield found
    with torch.no_grad():  # the optimizer's parts are views made so, which torch refuses to change otherwise
        for part in optimizer.chained_optimizers:
            if hasattr(part, "_copy_main_params_to_model_params"):  # else these are the parameters themselves
                part._copy_main_params_to_model_params()
    if any(isinstance(part, DistributedOptimizer) for part in optimizer.chained_optimizers):
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)


def _main(optimizer: MegatronOptimizer, parameter: nn.Parameter) -> Tensor | None:
    """Return what the optimizer updates of a parameter; None where another rank does all of it."""
    for part in optimizer.chained_optimizers:
        if isinstance(part, DistributedOptimizer):
            places = getattr(part, "model_param_group_index_map", {})  # a part without parameters has none
            if parameter in places:
                group, place = places[parameter]
                return part.optimizer.param_groups[group]["params"][place].data  # type: ignore[no-any-return]  # untyped
    if any(isinstance(part, DistributedOptimizer) for part in optimizer.chained_optimizers):
        return None
    main: nn.Parameter = getattr(parameter, "main_param", parameter)
    return main.data
