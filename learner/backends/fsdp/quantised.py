"""Finds the matrices of a sharded model of transformers that quantised engines have otherwise."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from learner.backends.fsdp.names import FileNames
from learner.backends.fsdp.weights import first_row, local, whole
from learner.backends.quantised.rounding import Rounding
from learner.backends.quantised.weights import Mixed, RoundedWeights, WeightPart
from storage.weights.quantisation import is_quantised


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
