"""A learner that leaves its device to others keeps the weights there, and what the optimizer remembers."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from learner.backends.megatron.core import DistributedDataParallel


def release_gradients(chunks: Iterable[DistributedDataParallel]) -> None:
    """Free the memory for gradients, and what torch keeps; `restore_gradients` comes before their use."""
    for gradients in _gradients(chunks):
        gradients.untyped_storage().resize_(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def restore_gradients(chunks: Iterable[DistributedDataParallel]) -> None:
    """Have memory for gradients again, which are to be set to zero; where it was not freed, do nothing.

    Views of them, which parameters and optimizer have, are views of it."""
    for gradients in _gradients(chunks):
        storage = gradients.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(gradients.nbytes)


def _gradients(chunks: Iterable[DistributedDataParallel]) -> Iterator[Tensor]:
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data
