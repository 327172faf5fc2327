"""Shows torch weights that lie on the host as words."""

from collections.abc import Mapping

import torch

from bus.errors import StorageError
from storage.weights.tensors import TORCH_DTYPES, HostTensor

DTYPES = {name: getattr(torch, dtype) for name, dtype in TORCH_DTYPES.items()}


def torch_tensors(tensors: Mapping[str, HostTensor]) -> dict[str, torch.Tensor]:
    """Return the same memory as tensors, to be read only. Raises `StorageError` for a dtype torch lacks."""
    if unknown := {tensor.dtype for tensor in tensors.values()} - DTYPES.keys():
        raise StorageError(f"torch has no {', '.join(sorted(unknown))}")
    return {name: torch_tensor(tensor) for name, tensor in tensors.items()}


def torch_tensor(tensor: HostTensor) -> torch.Tensor:
    """Return the same memory as a tensor of a dtype that torch has."""
    words = torch.from_numpy(tensor.words.view(f"i{tensor.words.itemsize}"))
    return words.view(DTYPES[tensor.dtype]).reshape(tensor.shape)
