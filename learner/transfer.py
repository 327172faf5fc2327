"""Copies between the host and the device that neither waits for, and the memory for them."""

import mmap
import weakref
from math import prod

import numpy as np
import torch
from torch import Tensor

from bus.errors import TrainingError

CUDA_SUCCESS = 0


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to `device` behind the work it has; a no-op when already there.

    From memory that the operating system may move, CUDA would first wait for all of that work. Torch keeps
    the pinned copy until it has been read.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def host_memory(sizes: tuple[int, ...], dtype: torch.dtype, *, page_locked: bool) -> Tensor:
    """Return zeros in memory of the host that stays where it is if `page_locked`, for copies beside the work.

    Takes whole pages, and no more: what torch pins takes the next power of two bytes, and is never given
    back. Raises `TrainingError` when the system does not let so much be locked.
    """
    size_bytes = prod(sizes) * dtype.itemsize
    pages = mmap.mmap(-1, page_bytes(size_bytes))
    memory = np.frombuffer(pages, np.uint8)
    if page_locked:
        _lock(memory)
    return torch.from_numpy(memory)[:size_bytes].view(dtype).view(sizes)


def page_bytes(size_bytes: int) -> int:
    """Bytes of the pages that so many bytes lie on, one at least."""
    return max(1, -(-size_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE


def _lock(memory: np.ndarray) -> None:
    """Lock it for as long as it lives; the device must be done with it then."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
    if error != CUDA_SUCCESS:
        raise TrainingError(
            f"CUDA could not lock {memory.nbytes:,} bytes of the host's memory (error {error}): "
            "free some, or raise the limit of this process (ulimit -l, the container's memory)"
        )
    unlocking = weakref.finalize(memory, cudart.cudaHostUnregister, memory.ctypes.data)
    unlocking.atexit = False  # then CUDA may be gone
