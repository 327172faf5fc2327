"""Undoes the quantisation of published weights, for engines that compute in another format."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from bus.errors import EngineError
from storage.weights.fp8 import dequantised
from storage.weights.int4 import unpacked
from storage.weights.quantisation import BLOCKS, PACKED, int4_names, scale_names, weight_of


def without_quantisation(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the weights in float32 that codes and scales stand for; the others are as they are.

    Raises `EngineError` for codes without scales."""
    in_int4 = [name.removesuffix(PACKED) for name in state if name.endswith(f".weight{PACKED}")]
    if in_int4:
        gone = {name for weight in in_int4 for name in int4_names(weight)}
        kept = {name: tensor for name, tensor in state.items() if name not in gone}
        return kept | {weight: _from_int4(weight, state) for weight in in_int4}
    if not any(tensor.dtype == torch.float8_e4m3fn for tensor in state.values()):
        return state
    return {
        name: _from_fp8(name, tensor, state) if tensor.dtype == torch.float8_e4m3fn else tensor
        for name, tensor in state.items()
        if weight_of(name) not in state
    }


def _from_fp8(name: str, codes: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    scales = next((state[each] for each in scale_names(name) if each in state), None)
    if scales is None:
        raise EngineError(f"{name} is in fp8 and came without its scales, {' or '.join(scale_names(name))}")
    return torch.from_numpy(dequantised(codes.view(torch.uint8).numpy(), scales.numpy(), BLOCKS))


def _from_int4(name: str, state: Mapping[str, Tensor]) -> Tensor:
    if missing := [each for each in int4_names(name) if each not in state]:
        raise EngineError(f"{name} is in int4 and came without {' and '.join(missing)}")
    codes, scales, shape = (state[each] for each in int4_names(name))
    words = codes.numpy().view(np.uint32)
    return torch.from_numpy(unpacked(words, scales.float().numpy(), int(shape[1])))
