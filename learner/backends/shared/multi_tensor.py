"""Arithmetic in one call on many tensors, or on two of different dtypes."""

import torch
from torch import Tensor

ROW = 4096
"""Elements that are summed up in float32 at a time on a CPU: torch loses a thousandth of 28 million there."""


def norm(tensors: list[Tensor]) -> Tensor:
    """Return the norm [], float32, of all tensors together."""
    if all(tensor.is_cuda for tensor in tensors):  # whose kernels sum up in a tree
        norms: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))
        return norms
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors:
        flat = tensor.reshape(-1)
        rows, rest = flat[: len(flat) // ROW * ROW].view(-1, ROW), flat[len(flat) // ROW * ROW :]
        of_rows = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
        total += of_rows.double().square().sum() + rest.double().square().sum()
    return total.sqrt().float()


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total`, float32, whatever the dtype of `a` and `b`."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.add_(a @ b)


MULTIPLE = 8
"""The kernel's rows begin at multiples of 16 bytes, so that widths in bfloat16 are multiples of this."""


def has_kernel(tokens: Tensor) -> bool:
    """Tell whether torch has a kernel for grouped products of such tokens."""
    return tokens.is_cuda and tokens.dtype == torch.bfloat16 and torch.cuda.get_device_capability() >= (9, 0)
