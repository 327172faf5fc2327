"""Floats of weights as float32, and as the words of their own dtypes, rounded to nearest, ties to even."""

import numpy as np
from numpy.typing import NDArray

from bus.errors import StorageError
from storage.weights.tensors import Words

Floats = NDArray[np.float32]


def widened(words: Words, dtype: str) -> Floats:
    """Return the values of words of a dtype in safetensors as float32. Raises `StorageError` for others."""
    if dtype == "BF16":
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "F32":
        return words.view(np.float32)
    if dtype == "F16":
        return words.view(np.float16).astype(np.float32)
    raise StorageError(f"weights of {dtype} cannot be quantised: BF16, F16 and F32 can")


def narrowed(values: Floats, dtype: str) -> Words:
    """Undo `widened`, of finite values. Raises `StorageError` for other dtypes."""
    if dtype == "BF16":
        bits = values.view(np.uint32)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    if dtype == "F32":
        return values.view(np.uint32)
    if dtype == "F16":
        return values.astype(np.float16).view(np.uint16)
    raise StorageError(f"weights of {dtype} cannot be quantised: BF16, F16 and F32 can")
