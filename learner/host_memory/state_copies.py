"""Copies of a rank's state on the host, which are written while training goes on."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from learner.host_memory.transfer import host_memory


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


class LateCopies:
    """Copies of tensors on the host, each made when its turn to be written comes, or when all are about to
    change: one checkpoint takes little memory where the disk is faster than a step."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = deque(tensors)
        self._are_copies = False
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Tensor]:
        """Yield one copy after another; any thread may iterate."""
        while self._tensors:
            with self._lock:
                tensor = self._tensors.popleft()
                copy = tensor if self._are_copies else tensor.clone()
            yield copy

    def copy(self) -> None:
        """Copy those that are left: on return the tensors may change."""
        with self._lock:
            self._tensors = deque(tensor.clone() for tensor in self._tensors)
            self._are_copies = True
