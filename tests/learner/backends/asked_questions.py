"""Questions of ranks."""

import traceback

import torch
from torch.utils._python_dispatch import TorchDispatchMode

QUESTIONS = [
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.equal.default,
]
"""Says what would make the host wait for a device: `item`, `bool`, `float`, shapes that depend on values."""


class Questions(TorchDispatchMode):
    """Writes down where the host asks for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in QUESTIONS:
            self.asked.append("".join(traceback.format_stack(limit=8)))
        return func(*args, **(kwargs or {}))
