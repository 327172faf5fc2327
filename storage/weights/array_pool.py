"""Pool of array memory: the memory of arrays that nobody holds serves new ones of the same size.

New memory comes from the system a page at a time, zeroed: that takes longer than writing into it."""

import weakref
from collections import defaultdict

import numpy as np

from storage.weights.tensors import Words


class _Piece(np.ndarray):
    """Owner of memory. Arrays given out have another class, so that views of them have them as base. Numpy
    would otherwise take the owner as base, and the end of the last view could not be noticed."""


class SpareMemory:
    """Gives out arrays. The memory of an array returns when nothing refers to it any more, on any thread."""

    def __init__(self) -> None:
        self._idle: defaultdict[int, list[_Piece]] = defaultdict(list)
        """Unused memory by size in bytes."""

    def like(self, words: Words) -> Words:
        """Return an array of the same size and dtype with undefined contents."""
        idle = self._idle[words.nbytes]
        try:
            piece = idle.pop()
        except IndexError:
            piece = _Piece(words.nbytes, np.uint8)
        array = piece.view(words.dtype, np.ndarray)
        weakref.finalize(array, idle.append, piece).atexit = False
        return array

    def trim(self) -> None:
        """Return unused memory to the system."""
        for idle in list(self._idle.values()):
            idle.clear()
