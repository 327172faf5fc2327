"""Finds the matrices of a sharded model of transformers that quantised engines have otherwise."""

from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from bus.errors import ConfigError
from learner.backends.fsdp.model import ShardedModel
from learner.backends.fsdp.names import FileNames
from learner.backends.fsdp.weights import first_row, local, whole
from learner.backends.quantised.matmul import Fp8Linear, refuse_sizes
from learner.backends.quantised.rounding import Rounding
from learner.backends.quantised.weights import Mixed, RoundedWeights, WeightPart
from storage.weights.quantisation import is_quantised


def multiply_in_fp8(model: ShardedModel) -> None:
    """Change the linear layers of attention and of MLPs, by the names that quantised formats know; experts in
    one tensor, routers, embeddings and the output layer stay.

    Raises `ConfigError` for a layer whose sizes do not allow it, and for a model without such layers."""
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and is_quantised(f"{name}.weight", tuple(module.weight.shape))
    }
    if not linear:
        raise ConfigError(
            f"learner.fp8_matmul=true knows no layer of {type(model.hf).__name__}, but linear layers by the "
            "names of known families, as q_proj and up_proj: set it to false"
        )
    for name, module in linear.items():
        refuse_sizes(name, module.weight)
        module.forward = partial(_linear, module)  # type: ignore[method-assign]


def _linear(module: torch.nn.Linear, inputs: Tensor) -> Tensor:
    output: Tensor = Fp8Linear.apply(inputs, module.weight, None)  # type: ignore[no-untyped-call]
    return output if module.bias is None else output + module.bias


def rounded_weights(
    tensors: Mapping[str, Tensor], names: FileNames, rounding: Rounding, dtype: torch.dtype
) -> RoundedWeights:
    """Return this rank's part of the weights, and what engines make of them; `dtype` is what layers compute
    in. Raises `ConfigError` where they cannot be quantised so."""
    rounding.refuse(names.files)
    parts: list[WeightPart] = []
    mixed: list[Mixed] = []
    for name, tensor in tensors.items():
        files = names.tensors[name].files
        if not any(is_quantised(file, shape) for file, shape in files.items()):
            continue
        if names.tensors[name].is_as_in_files:
            parts.append(_part(tensor))
        else:
            mixed.append(_mixed(name, tensor, names, dtype))
    return RoundedWeights(rounding, parts, mixed, dtype)


def _part(tensor: Tensor) -> WeightPart:
    mine, (rows, columns), ranks = local(tensor), tensor.shape, dist.get_world_size()
    return WeightPart(
        mine,
        (len(mine), columns),
        (rows, columns),
        row=first_row(tensor),
        group=dist.group.WORLD if ranks > 1 else None,
        step=(-(-rows // ranks), columns),
    )


def _mixed(name: str, tensor: Tensor, names: FileNames, dtype: torch.dtype) -> Mixed:
    start, stop = first_row(tensor), first_row(tensor) + len(local(tensor))
    return Mixed(
        local(tensor),
        lambda: names.split(name, whole(tensor, dtype)),
        lambda matrices: names.merge(name, matrices)[start:stop],
    )
