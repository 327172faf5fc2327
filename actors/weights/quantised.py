"""Undoes the quantisation of published weights, for engines that compute in another format."""

from collections.abc import Mapping

import torch
from torch import Tensor

from bus.errors import EngineError
from storage.weights.fp8 import dequantised
from storage.weights.quantisation import BLOCKS, scale_names, weight_of


def without_quantisation(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the weights in float32 that codes and scales stand for; the others are as they are.

    Raises `EngineError` for codes without scales."""
    if not any(tensor.dtype == torch.float8_e4m3fn for tensor in state.values()):
        return state
    return {
        name: _float32(name, tensor, state) if tensor.dtype == torch.float8_e4m3fn else tensor
        for name, tensor in state.items()
        if weight_of(name) not in state
    }


def _float32(name: str, codes: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    scales = next((state[each] for each in scale_names(name) if each in state), None)
    if scales is None:
        raise EngineError(f"{name} is in fp8 and came without its scales, {' or '.join(scale_names(name))}")
    return torch.from_numpy(dequantised(codes.view(torch.uint8).numpy(), scales.numpy(), BLOCKS))
