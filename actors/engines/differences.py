"""Where weights differ from those before them, as the delta said in which they came.

Engines of this process share the tensors: each would have to compare all of them otherwise."""

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from storage.deltas import Moved
from storage.weights import Words

GAP = np.dtype(np.uint16)
WORTH_IT = 0.5
"""What changes may take of the space of the whole."""


class _Difference(NamedTuple):
    old: "weakref.ref[Words]"
    new: "weakref.ref[Words]"
    gaps: Words
    values: Words


_noted: dict[int, _Difference] = {}
"""By the address of the new words, as long as these live."""


def worth_it(size_bytes: int, itemsize: int) -> int:
    """How many changed elements of a tensor may be written alone: each takes a gap and itself."""
    return int(WORTH_IT * size_bytes / (GAP.itemsize + itemsize))


def note(old: Words, new: Words, moved: Sequence[Moved]) -> None:
    """Remember the words that are others in `new`, and how many lie between each and the one before it.

    Nobody writes to either from now on."""
    if sum(len(part.gaps) for part in moved) > worth_it(new.nbytes, new.itemsize):
        return  # then all are written
    gaps = _gaps_of(moved)
    if gaps is None:
        return
    address, values = new.ctypes.data, np.concatenate([part.words for part in moved])
    _noted[address] = _Difference(weakref.ref(old), weakref.ref(new), gaps, values)
    weakref.finalize(new, _noted.pop, address, None).atexit = False


def _gaps_of(moved: Sequence[Moved]) -> Words | None:
    """The gaps of all parts; `None` where one is too wide: few elements far apart are found soon."""
    joined, last = [], -1
    for start, gaps, _ in moved:
        if len(gaps):
            first = start + int(gaps[0]) - last - 1
            if max(first, int(gaps.max())) > np.iinfo(GAP).max:
                return None
            joined.append(gaps.astype(GAP))
            joined[-1][0] = first
            last = start + int(gaps.sum(dtype=np.int64)) + len(gaps) - 1
    return np.concatenate(joined)


def known(old: torch.Tensor, new: torch.Tensor) -> tuple[Words, Words] | None:
    """The gaps (uint16) and words, where `new` came as what changed in `old`.

    Both lie in the memory of what came."""
    found = _noted.get(new.data_ptr())
    if found is None or not (old.is_contiguous() and new.is_contiguous()):
        return None
    words = found.old(), found.new()
    at = [(w.ctypes.data, w.nbytes) for w in words if w is not None]
    same = at == [(tensor.data_ptr(), tensor.nbytes) for tensor in (old, new)]
    return (found.gaps, found.values) if same else None
