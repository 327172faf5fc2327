"""Copies from the host that do not wait for what the device has still to do."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to `device` behind the work it has; a no-op when already there.

    From memory that the operating system may move, CUDA would first wait for all of that work. Torch keeps
    the pinned copy until it has been read.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
