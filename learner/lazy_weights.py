"""Weights that are read one at a time, so that a model larger than memory can be converted or loaded."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_128

State = Mapping[str, Tensor]
"""Weights by their Hugging Face name."""


class Spec(NamedTuple):
    """Shape and dtype of a tensor, known before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Return the size of all its elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class LazyWeights(Mapping[str, Tensor]):
    """Weights by Hugging Face name; each look-up reads from disk."""

    @abstractmethod
    def __contains__(self, name: object) -> bool:
        """Tell without reading; the look-up that `Mapping` does by default would read."""

    @abstractmethod
    def spec(self, name: str) -> Spec:
        """Return shape and dtype without reading the tensor."""

    def part(self, name: str, dimension: int, start: int, stop: int) -> Tensor:
        """Return the elements from `start` to `stop` along a dimension; reads no others where it can."""
        return self[name].narrow(dimension, start, stop - start)


def spec_of(state: State, name: str) -> Spec:
    """Return shape and dtype of one tensor, unread where that is possible."""
    if isinstance(state, LazyWeights):
        return state.spec(name)
    return Spec(tuple(state[name].shape), state[name].dtype)


def part_of(state: State, name: str, dimension: int, start: int, stop: int) -> Tensor:
    """Return the elements from `start` to `stop` along a dimension, the others unread where possible."""
    if isinstance(state, LazyWeights):
        return state.part(name, dimension, start, stop)
    return state[name].narrow(dimension, start, stop - start)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the elements in order, as they lie in memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def tensor_digest(tensor: Tensor) -> str:
    """Return the xxh3-128 digest of its bytes, in hexadecimal; signs of zeros and NaNs count."""
    return xxh3_128(tensor_bytes(tensor)).hexdigest()
