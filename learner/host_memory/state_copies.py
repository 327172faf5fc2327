"""Copies of a rank's state on the host, which are written while training goes on."""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from learner.host_memory.transfer import host_memory


class StateCopies:
    """Copies of tensors, which may change after `keep`.

    Those on a GPU are copied beside its further work. Those on the host are copied when their turn to be
    written comes, or else by `keep`: one checkpoint takes little memory where the disk is faster than a step.
    """

    def __init__(
        self, tensors: Sequence[Tensor], copied: Sequence[Tensor | None], arrived: torch.cuda.Event | None
    ) -> None:
        """Hold `tensors`. Those with a copy in `copied` have `arrived` there after the event."""
        self._sources = tensors if arrived is not None else ()  # the device reads them: nobody may free them
        self._copies = list(copied)
        self._waiting = {n: tensor for n, tensor in enumerate(tensors) if copied[n] is None}
        self._arrived = arrived
        self._lock = threading.Lock()

    def take(self, number: int) -> Tensor:
        """Return the copy of a tensor, once; any thread may call this."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._sources = ()
        with self._lock:
            tensor = self._waiting.pop(number, None)
            copy, self._copies[number] = self._copies[number], None
            if copy is None and tensor is not None:
                copy = tensor.clone()
        assert copy is not None, f"copy {number} is taken twice"
        return copy

    def keep(self) -> None:
        """Let the tensors change: at once on the host, on a GPU behind the work it has now."""
        if self._arrived is not None:
            torch.cuda.current_stream().wait_event(self._arrived)
        with self._lock:
            for number, tensor in self._waiting.items():
                self._copies[number] = tensor.clone()
            self._waiting = {}


class CopyBuffers:
    """Page-locked host memory that one checkpoint after another reuses, since to lock it takes seconds."""

    def __init__(self) -> None:
        self._memory: list[Tensor] = []
        self._beside: torch.cuda.Stream | None = None

    def copies(self, tensors: Sequence[Tensor]) -> StateCopies:
        """Begin to copy the tensors, over the copies of the call before, which must be written."""
        tensors = [tensor.detach() for tensor in tensors]
        sources = [tensor for tensor in tensors if tensor.is_cuda]
        wanted = [(tensor.shape, tensor.dtype) for tensor in sources]
        if wanted != [(memory.shape, memory.dtype) for memory in self._memory]:
            self._memory = []  # freed before more is allocated
            self._memory = host_memory(wanted, page_locked=True)
        if not sources:
            return StateCopies(tensors, [None] * len(tensors), None)
        self._beside = self._beside or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._beside.wait_stream(torch.cuda.current_stream())
        arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._beside):
            for memory, source in zip(self._memory, sources, strict=True):
                memory.copy_(source, non_blocking=True)
            arrived.record()
        places = iter(self._memory)
        return StateCopies(tensors, [next(places) if t.is_cuda else None for t in tensors], arrived)
