"""Memory of the host: copies to and from the device that neither waits for, and copies of a rank's state."""

import mmap
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from math import prod

import numpy as np
import torch
from torch import Tensor

from bus.errors import TrainingError
from storage.weights.tensors import TORCH_DTYPES, WORD, HostTensor

CUDA_SUCCESS = 0
ALIGNED_BYTES = 64
"""Tensors start at multiples of so many bytes."""
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
"""No shared memory, of which containers often have little."""


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to `device` behind the work it has; a no-op when already there.

    From memory that the operating system may move, CUDA would first wait for all of that work. Torch keeps
    the pinned copy until it has been read."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def host_memory(wanted: Iterable[tuple[Sequence[int], torch.dtype]], *, page_locked: bool) -> list[Tensor]:
    """Return zeros of these shapes and dtypes, all in one piece of the host's memory.

    Locked, the pages stay where they are, so that copies run beside the work. They take no more than the
    tensors: what torch pins is rounded up to a power of two bytes, tensor by tensor, and never given back.
    Each tensor has a storage of its own, so that it can be saved without the others.
    Raises `TrainingError` when the system does not let so much be locked."""
    wanted = list(wanted)
    sizes = [prod(shape) * dtype.itemsize for shape, dtype in wanted]
    padded = [-(-size // ALIGNED_BYTES) * ALIGNED_BYTES for size in sizes]
    pages = mmap.mmap(-1, page_bytes(sum(padded)), flags=PRIVATE)
    with suppress(AttributeError, OSError):  # not every system has large ones: they are locked sooner
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    if page_locked:
        lock_pages(memory)
    starts = accumulate(padded, initial=0)
    return [
        torch.from_numpy(memory[start : start + size]).view(dtype).view(tuple(shape))
        for start, size, (shape, dtype) in zip(starts, sizes, wanted, strict=False)  # one start is left
    ]


def page_bytes(size_bytes: int) -> int:
    """Return the number of bytes of the pages that so many bytes lie on, one at least."""
    return max(1, -(-size_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE


def lock_pages(memory: np.ndarray) -> None:
    """Lock the memory for as long as it lives; the device must be done with it then. Raises `TrainingError`
    when the system does not let so much be locked."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
    if error != CUDA_SUCCESS:
        raise TrainingError(
            f"CUDA could not lock {memory.nbytes:,} bytes of the host's memory (error {error}): "
            "free some, or raise the limit of this process (ulimit -l, the container's memory)"
        )
    unlocking = weakref.finalize(memory, cudart.cudaHostUnregister, memory.ctypes.data)
    unlocking.atexit = False  # then CUDA may be gone


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


class StateReaders:
    """What still reads a rank's state, which may not change meanwhile."""

    def __init__(self) -> None:
        self.published: torch.cuda.Event | None = None
        """Event until which the copy to be published reads weights."""
        self.saved: StateCopies | None = None
        """What a checkpoint copies."""

    def settle(self) -> None:
        """Let the state change: at once on the host, on a GPU behind the work it has now."""
        if self.published is not None:
            torch.cuda.current_stream().wait_event(self.published)
        if self.saved is not None:
            self.saved.keep()
        self.published = self.saved = None


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


NAMES = {getattr(torch, dtype): name for name, dtype in TORCH_DTYPES.items()}
"""Name of each torch dtype in safetensors."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def host_tensors(state: Mapping[str, Tensor]) -> dict[str, HostTensor]:
    """Return the same memory as words; tensors must be contiguous and on the host."""
    found = {}
    for name, tensor in state.items():
        size = tensor.element_size()
        words = tensor.detach().reshape(-1).view(INTEGERS[size]).numpy().view(WORD[size])
        found[name] = HostTensor(NAMES[tensor.dtype], tuple(tensor.shape), words)
    return found
