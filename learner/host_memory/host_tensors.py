"""Tensors of torch as the words that are compressed, hashed and sent."""

from collections.abc import Mapping

import torch
from torch import Tensor

from storage.weights.tensors import TORCH_DTYPES, WORD, HostTensor

NAMES = {getattr(torch, dtype): name for name, dtype in TORCH_DTYPES.items()}
"""Name of each torch dtype in safetensors."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def host_tensors(state: Mapping[str, Tensor]) -> dict[str, HostTensor]:
    """Return the same memory as words; tensors must be contiguous and on the host."""
    found = {}
    for name, tensor in state.items():
        size = tensor.element_size()
        words = tensor.detach().reshape(-1).view(INTEGERS[size]).numpy().view(WORD[size])
        found[name] = HostTensor(NAMES[tensor.dtype], tuple(tensor.shape), words)
    return found
