"""What quantisation makes of weights, computed by torch alone, block by block."""

import torch

from storage.weights.quantisation import is_quantised


def rounded(weight, name):
    """The float32 values that an engine of a format computes with, for one weight."""
    if name == "int4":
        return rounded_to_int4(weight)
    if name == "fp8_channel":
        scales = weight.float().abs().amax(1, keepdim=True) / 448
        return (weight.float() / scales).to(torch.float8_e4m3fn).float() * scales
    weight, size = weight.float(), 10**9 if name == "fp8_tensor" else 128
    result = torch.empty_like(weight)
    for rows in range(0, weight.shape[0], size):
        for columns in range(0, weight.shape[1], size):
            place = slice(rows, rows + size), slice(columns, columns + size)
            scale = weight[place].abs().max() / 448
            if name == "fp8_ue8m0":
                scale = torch.exp2(torch.ceil(torch.log2(scale)))
            result[place] = (weight[place] / scale).to(torch.float8_e4m3fn).float() * scale
    return result


def rounded_to_int4(weight):
    """Multiples from -8 to 7 of the scales of 128 columns, which have the dtype of the weight."""
    groups = weight.float().unflatten(1, (-1, 128))
    scales = (groups.abs().amax(-1, keepdim=True) / 7.5).to(weight.dtype).float()
    return ((groups / scales).round().clamp(-8, 7) * scales).flatten(1)


def served(state, name):
    """The same for all weights of a model."""
    return {
        key: rounded(weight, name) if is_quantised(key, tuple(weight.shape)) else weight.float()
        for key, weight in state.items()
    }
