"""Frees device memory of a learner that leaves its device to others: all but weights and optimizer state."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from learner.backends.megatron.core.megatron_core import DistributedDataParallel


def release_gradients(chunks: Iterable[DistributedDataParallel]) -> None:
    """Free the memory for gradients, and what torch keeps; `restore_gradients` comes before their use."""
    for gradients in _gradients(chunks):
        gradients.untyped_storage().resize_(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def restore_gradients(chunks: Iterable[DistributedDataParallel]) -> None:
    """Allocate the memory of gradients again, not yet zeroed; do nothing if it was not freed.

    The views of it that parameters and optimizer have stay valid."""
    for gradients in _gradients(chunks):
        storage = gradients.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(gradients.nbytes)


def _gradients(chunks: Iterable[DistributedDataParallel]) -> Iterator[Tensor]:
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data
