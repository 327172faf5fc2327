"""Weights that are published from where they are trained, so that no copy lies beside them on a CPU."""

import threading
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from bus.errors import StorageError
from learner.host_memory.copies import INTEGERS, host_memory
from storage.disk.atomic_files import Data
from storage.weights.tensors import ITEM_BYTES, HostTensor, Words, place_of

PIECE_BYTES = 8 << 20
"""Bytes that are copied at a time for who reads all."""


class LentTensor(HostTensor):
    """A tensor that training may change as soon as it has called `LentWeights.let_change`. What is read of it
    before is a copy, which stays as it is."""

    __slots__ = ("is_copy", "lent", "place")
    lent: "LentWeights"
    place: Words
    """Memory in which the elements lie, as long as the weights have not changed."""
    is_copy: bool
    """Whether that memory is the tensor's own."""

    def __init__(self, tensor: HostTensor, lent: "LentWeights", *, is_copy: bool) -> None:
        for name, value in (("dtype", tensor.dtype), ("shape", tensor.shape), ("lent", lent)):
            object.__setattr__(self, name, value)
        self.move(tensor.words, is_copy=is_copy)

    @property
    def words(self) -> Words:
        return self._read(slice(None))

    def part(self, number: int) -> Words:
        return self._read(place_of(number, self.count, ITEM_BYTES[self.dtype]))

    def pieces(self) -> Iterator[Data]:
        step = PIECE_BYTES // ITEM_BYTES[self.dtype]
        for start in range(0, self.count, step):
            yield self._read(slice(start, start + step)).data

    def move(self, place: Words, *, is_copy: bool) -> None:
        """Have the elements lie there from now on."""
        object.__setattr__(self, "place", place)
        object.__setattr__(self, "is_copy", is_copy)

    def _read(self, place: slice) -> Words:
        return self.lent.read(self, place)


class LentWeights:
    """The weights of one version until they change: readers take what they need piece by piece.

    The publication that reads them does not hold up training. If it is not done when they are to change, what
    it lacks is copied then, as a checkpoint's is (`StateCopies`)."""

    def __init__(self, views: Mapping[str, HostTensor], copies: Mapping[str, HostTensor]) -> None:
        """Lend these views of the weights, and with them copies of weights that no view shows as they are
        published."""
        self.tensors = {name: LentTensor(view, self, is_copy=False) for name, view in views.items()}
        self.tensors |= {name: LentTensor(copy, self, is_copy=True) for name, copy in copies.items()}
        self._lock = threading.Lock()
        self._changed = False
        self._read = True
        """Whether the publication of this version still reads them."""
        self._kept = False
        """Whether somebody needs them after it."""

    def read(self, tensor: LentTensor, place: slice) -> Words:
        """Return elements of a tensor, which stay as they are. Raises `StorageError` once they have
        changed."""
        with self._lock:
            if self._changed:
                raise StorageError("the weights of this version were trained further: publish the next one")
            return tensor.place[place] if tensor.is_copy else tensor.place[place].copy()

    def keep(self) -> bool:
        """Give the tensors memory of their own; tell whether they are still as they were lent. Any thread may
        call this."""
        with self._lock:
            if not self._changed:
                self._kept = True
                self._copy()
            return self._kept

    def end_reading(self) -> None:
        """Let the weights change without a copy, unless they are kept: they are published."""
        with self._lock:
            self._read = False

    def let_change(self) -> None:
        """Return when the weights may change. Those that are still read or kept are copied; else all go that
        were."""
        with self._lock:
            if self._read or self._kept:
                self._copy()
            else:
                self._changed = True
                for tensor in self.tensors.values():
                    tensor.move(np.empty(0, tensor.place.dtype), is_copy=False)

    def _copy(self) -> None:
        views = [tensor for tensor in self.tensors.values() if not tensor.is_copy]
        memory = host_memory([(tensor.shape, _signed(tensor)) for tensor in views], page_locked=False)
        for copy, tensor in zip(memory, views, strict=True):  # all in one piece, which goes back whole
            words = copy.view(-1).numpy().view(tensor.place.dtype)
            words[:] = tensor.place
            tensor.move(words, is_copy=True)


def _signed(tensor: HostTensor) -> torch.dtype:
    return INTEGERS[ITEM_BYTES[tensor.dtype]]


def lent_among(tensors: Mapping[str, HostTensor]) -> LentWeights | None:
    """Return the weights that some of these tensors are lent from; None where all lie in memory of their
    own."""
    return next((each.lent for each in tensors.values() if isinstance(each, LentTensor)), None)


def owned(tensor: HostTensor) -> HostTensor:
    """Return the tensor in memory of its own, where it was lent with others."""
    if not isinstance(tensor, LentTensor):
        return tensor
    return HostTensor(tensor.dtype, tensor.shape, tensor.words.copy())
