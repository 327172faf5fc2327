"""Copies of a rank's state on the host, which are written while training goes on."""

from collections.abc import Sequence

import torch
from torch import Tensor

from learner.publication.transfer import host_memory


class CopyBuffers:
    """Host memory that one checkpoint after another reuses, since page-locking it takes seconds.

    Copies of tensors that lie on the host themselves are freed when they are written."""

    def __init__(self) -> None:
        self._memory: list[Tensor] = []

    def copied(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies, complete on return, which overwrite those of the call before."""
        wanted = [(tensor.shape, tensor.dtype) for tensor in tensors if tensor.is_cuda]
        if wanted != [(memory.shape, memory.dtype) for memory in self._memory]:
            self._memory = []  # freed before more is allocated
            self._memory = host_memory(wanted, page_locked=True)
        places = iter(self._memory)
        copies = [
            next(places).copy_(tensor.detach(), non_blocking=True) if tensor.is_cuda else tensor.clone()
            for tensor in tensors
        ]
        if wanted:
            torch.cuda.synchronize()
        return copies
