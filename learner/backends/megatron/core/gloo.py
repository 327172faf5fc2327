"""Collectives over slices of different lengths, which megatron-core needs and gloo lacks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_uneven(piece: Tensor, group: dist.ProcessGroup, sizes: Sequence[int]) -> Tensor:
    """Lay the pieces of all ranks end to end; that of rank i has `sizes[i]` rows."""
    whole = piece.new_zeros(sum(sizes), *piece.shape[1:])
    torch.split(whole, list(sizes))[group.rank()].copy_(piece)
    dist.all_reduce(whole, group=group)  # each place has one rank's rows and zeros of all others
    return whole


def reduce_scatter_uneven(whole: Tensor, group: dist.ProcessGroup, sizes: Sequence[int]) -> Tensor:
    """Add up `whole` over the ranks, of which rank i keeps `sizes[i]` rows."""
    total = whole.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return torch.split(total, list(sizes))[group.rank()].contiguous()


def allow_uneven_slices(mappings: Any) -> None:
    """Make the autograd functions in megatron-core's `mappings` use the functions above where they must."""

    def replaced(even: Callable[..., Any], uneven: Callable[..., Tensor]) -> Callable[..., Any]:
        def collective(
            tensor: Tensor, group: dist.ProcessGroup, sizes: Sequence[int] | None = None, *buffer: bool
        ) -> Any:
            if sizes is None or group.size() == 1:
                return even(tensor, group, sizes, *buffer)
            return uneven(tensor, group, sizes)

        return collective

    mappings._gather_along_first_dim = replaced(mappings._gather_along_first_dim, gather_uneven)
    mappings._reduce_scatter_along_first_dim = replaced(
        mappings._reduce_scatter_along_first_dim, reduce_scatter_uneven
    )
