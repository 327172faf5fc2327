"""Memory of arrays that nobody holds any more, for others of the same size.

New memory comes from the system a page at a time, zeroed: that takes longer than writing into it."""

import weakref
from collections import defaultdict

import numpy as np

from storage.weights.tensors import Words


class _Piece(np.ndarray):
    """Owns memory. Arrays given out are of another class, so that they are the base of what is made of them:
    else numpy would take the owner, and nobody could tell when the last of them is gone."""


class SpareMemory:
    """Gives out arrays; the memory of each comes back when nothing refers to it any more, from any thread."""

    def __init__(self) -> None:
        self._idle: defaultdict[int, list[_Piece]] = defaultdict(list)
        """By size in bytes."""

    def like(self, words: Words) -> Words:
        """An array of the same size and dtype, with anything in it."""
        idle = self._idle[words.nbytes]
        try:
            piece = idle.pop()
        except IndexError:
            piece = _Piece(words.nbytes, np.uint8)
        array = piece.view(words.dtype, np.ndarray)
        weakref.finalize(array, idle.append, piece).atexit = False
        return array

    def trim(self) -> None:
        """Give back to the system what nobody uses."""
        for idle in list(self._idle.values()):
            idle.clear()
