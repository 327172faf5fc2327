"""Copies between the host and the device that neither waits for, and the memory for them."""

import mmap
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import accumulate
from math import prod

import numpy as np
import torch
from torch import Tensor

from bus.errors import TrainingError

CUDA_SUCCESS = 0
ALIGNED_BYTES = 64
"""Tensors start at multiples of so many bytes."""
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
"""No shared memory, of which containers often have little."""


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to `device` behind the work it has; a no-op when already there.

    From memory that the operating system may move, CUDA would first wait for all of that work. Torch keeps
    the pinned copy until it has been read.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def host_memory(wanted: Iterable[tuple[Sequence[int], torch.dtype]], *, page_locked: bool) -> list[Tensor]:
    """Return zeros of these shapes and dtypes, all in one piece of the host's memory.

    Locked, the pages stay where they are, so that copies run beside the work. They take no more than the
    tensors: what torch pins is rounded up to a power of two bytes, tensor by tensor, and never given back.
    Each tensor has a storage of its own, so that it can be saved without the others.
    Raises `TrainingError` when the system does not let so much be locked.
    """
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
    """Lock it for as long as it lives; the device must be done with it then.

    Raises `TrainingError` when the system does not let so much be locked."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
    if error != CUDA_SUCCESS:
        raise TrainingError(
            f"CUDA could not lock {memory.nbytes:,} bytes of the host's memory (error {error}): "
            "free some, or raise the limit of this process (ulimit -l, the container's memory)"
        )
    unlocking = weakref.finalize(memory, cudart.cudaHostUnregister, memory.ctypes.data)
    unlocking.atexit = False  # then CUDA may be gone
