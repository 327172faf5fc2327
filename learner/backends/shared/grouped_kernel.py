"""Tells where torch multiplies the tokens of several experts by the weights of all in one kernel."""

import torch
from torch import Tensor

MULTIPLE = 8
"""The kernel's rows begin at multiples of 16 bytes, so that widths in bfloat16 are multiples of this."""


def has_kernel(tokens: Tensor) -> bool:
    """Tell whether torch has a kernel for grouped products of such tokens."""
    return tokens.is_cuda and tokens.dtype == torch.bfloat16 and torch.cuda.get_device_capability() >= (9, 0)
