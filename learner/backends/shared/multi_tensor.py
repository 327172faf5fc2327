"""Arithmetic in one call on many tensors, or on two of different dtypes."""

import torch
from torch import Tensor


def norm(tensors: list[Tensor]) -> Tensor:
    """Return the norm [] of all tensors together."""
    total: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))
    return total


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total`, float32, whatever the dtype of `a` and `b`."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.add_(a @ b)
