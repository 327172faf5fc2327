"""megatron-core's loops over tensors, each in one call: its own copy every norm to the host one by one."""

from collections.abc import Sequence

import torch
from torch import Tensor


def l2_norm(
    _chunk_size: int, _no_op: Tensor, tensors: Sequence[Sequence[Tensor]], _per_tensor: bool
) -> tuple[Tensor, None]:
    """The norm [1] of all tensors together, with the signature of apex's `multi_tensor_l2norm`."""
    norms = torch._foreach_norm([tensor for group in tensors for tensor in group])
    return torch.linalg.vector_norm(torch.stack(norms))[None], None


def scale(_chunk_size: int, _no_op: Tensor, tensors: Sequence[list[Tensor]], factor: float) -> None:
    """Write the first tensors times `factor` to the second; the signature of apex's `multi_tensor_scale`."""
    source, target = tensors
    if source is not target:
        torch._foreach_copy_(target, source)
    torch._foreach_mul_(target, factor)
