"""Pool of array memory: the memory of arrays that nobody holds serves new ones of the same size.

New memory comes from the system a page at a time, zeroed: that takes longer than writing into it. Memory of a
tensor's earlier version lacks little of the present one: to write that is less than to copy all."""

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np

from storage.weights.tensors import Words

T = TypeVar("T")


class _Piece(np.ndarray):
    """Owner of memory. Arrays given out have another class, so that views of them have them as base. Numpy
    would otherwise take the owner as base, and the end of the last view could not be noticed."""

    later: "tuple[weakref.ref[Words], object] | None" = None
    """Array that has other contents than this memory in a few places, and these; None where none is known."""

    @property
    def behind(self) -> Words | None:
        """Return the array of which it is known what this memory lacks, while that is there."""
        return None if self.later is None else self.later[0]()


class SpareMemory(Generic[T]):
    """Gives out arrays. The memory of an array returns when nothing refers to it any more, on any thread. `T`
    is what one array has and another one lacks."""

    def __init__(self) -> None:
        self._idle: defaultdict[int, list[_Piece]] = defaultdict(list)
        """Unused memory by size in bytes."""
        self._taking = threading.Lock()

    def like(self, words: Words) -> Words:
        """Return an array of the same size and dtype with undefined contents."""
        for fits in (lambda piece: piece.behind is None, lambda _: True):
            if (piece := self._taken(words, fits)) is not None:
                return self._given(piece, words)
        return self._given(_Piece(words.nbytes, np.uint8), words)

    def differs(self, old: Words, new: Words, what: T) -> None:
        """Remember what `new` has and `old` lacks. Nobody writes to either from now on."""
        if isinstance(old.base, _Piece):
            old.base.later = weakref.ref(new), what

    def behind(self, words: Words) -> tuple[Words, T] | None:
        """Return an array that has the contents of `words`, and what it lacks of them; None if there is no
        such array."""
        piece = self._taken(words, lambda piece: piece.behind is words)
        if piece is None or piece.later is None:
            return None
        what: T = piece.later[1]  # type: ignore[assignment]  # `differs` put it there
        return self._given(piece, words), what

    def _taken(self, words: Words, fits: Callable[[_Piece], bool]) -> _Piece | None:
        """Take unused memory of the size of `words`, if there is any that fits."""
        idle = self._idle[words.nbytes]
        with self._taking:  # others only append meanwhile
            for n, piece in enumerate(idle):
                if fits(piece):
                    del idle[n]
                    return piece
        return None

    def _given(self, piece: _Piece, words: Words) -> Words:
        piece.later = None
        array = piece.view(words.dtype, np.ndarray)
        weakref.finalize(array, self._idle[words.nbytes].append, piece).atexit = False
        return array

    def trim(self) -> None:
        """Return unused memory to the system."""
        for idle in list(self._idle.values()):
            idle.clear()
