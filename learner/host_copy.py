"""The weights' way from the device to the host: the only part of a publication that training waits for."""

import time
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from storage.weights import TORCH_DTYPES, WORD, HostTensor

NAMES = {getattr(torch, dtype): name for name, dtype in TORCH_DTYPES.items()}
"""Of safetensors."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class HostCopy:
    """Two sets of host buffers that take turns, page-locked where there is a GPU.

    What `take` returned last stays as it is while the next `take` fills the other set.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.seconds = 0.0
        """That the latest `take` took."""
        self._dtype = dtype
        self._sets: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        self._turn = 0

    def take(self, weights: Iterable[tuple[str, Tensor]]) -> Mapping[str, Tensor]:
        """Copy what `weights` yields, one after another, as the dtype to publish; returns when all are here.

        Each tensor must be good only until the next is asked for: on a GPU the copies are queued behind
        what made them."""
        began = time.perf_counter()
        self._turn = 1 - self._turn
        buffers = self._sets[self._turn]
        on_gpu = False
        for name, tensor in weights:
            on_gpu = on_gpu or tensor.is_cuda
            if name not in buffers:
                buffers[name] = torch.empty(tensor.shape, dtype=self._dtype, pin_memory=tensor.is_cuda)
            buffers[name].copy_(tensor.detach(), non_blocking=True)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        self.seconds = time.perf_counter() - began
        return buffers


def host_tensors(state: Mapping[str, Tensor]) -> dict[str, HostTensor]:
    """The same memory as words; tensors must be contiguous and on the host."""
    found = {}
    for name, tensor in state.items():
        size = tensor.element_size()
        words = tensor.detach().reshape(-1).view(INTEGERS[size]).numpy().view(WORD[size])
        found[name] = HostTensor(NAMES[tensor.dtype], tuple(tensor.shape), words)
    return found
