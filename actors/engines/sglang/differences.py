"""Where weights differ from those before them, as the delta said in which they came.

Engines of this process share the tensors: each would have to compare all of them otherwise."""

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from actors.engines.sglang.in_server.sluice_changes import GAP_BITS
from storage.weights.deltas import Moved, Positions
from storage.weights.tensors import Words

GAP = np.dtype(np.uint16)
FARTHEST = GAP_BITS + 1
"""From one element of a file to the next at most, since a gap tells no more."""
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
    gaps, values = _joined(new, moved)
    if len(gaps) > worth_it(new.nbytes, new.itemsize):
        return  # then all are written
    address = new.ctypes.data
    _noted[address] = _Difference(weakref.ref(old), weakref.ref(new), gaps, values)
    weakref.finalize(new, _noted.pop, address, None).atexit = False


def gaps_and_words(words: Words, positions: Positions, before: int = -1) -> tuple[Words, Words]:
    """How a file tells of the words at `positions`: the gaps, the first counted from `before`, and the words.

    Where a gap would be too wide words in between are told of too, as they are. In embeddings rows of tokens
    that were never seen make such gaps."""
    positions = _in_reach(positions, before)
    return (np.diff(positions, prepend=before) - 1).astype(GAP), words[positions]


def _in_reach(positions: Positions, before: int) -> Positions:
    """With others put in where a step would be too wide."""
    steps = np.diff(positions, prepend=before)
    missing = (steps - 1) // FARTHEST
    far = np.flatnonzero(missing)
    counts = missing[far]
    nth = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + 1
    between = np.repeat(positions[far] - steps[far], counts) + nth * FARTHEST
    return np.sort(np.concatenate([positions, between])) if len(far) else positions


def _joined(new: Words, moved: Sequence[Moved]) -> tuple[Words, Words]:
    """What a file tells of all parts together."""
    all_gaps, all_values, last = [], [], -1
    for part in moved:
        if not len(part.gaps):
            continue
        first, values = part.start + int(part.gaps[0]) - last - 1, part.words
        if max(first, int(part.gaps.max())) < FARTHEST:
            gaps = part.gaps.astype(GAP)
            gaps[0] = first
        else:
            gaps, values = gaps_and_words(new, part.positions, last)
        all_gaps.append(gaps)
        all_values.append(values)
        last = part.last
    return np.concatenate(all_gaps), np.concatenate(all_values)


def known(old: torch.Tensor, new: torch.Tensor) -> tuple[Words, Words] | None:
    """The gaps (uint16) and words, where `new` came as what changed in `old`.

    `old` and `new` lie in the memory of what came."""
    found = _noted.get(new.data_ptr())
    if found is None or not (old.is_contiguous() and new.is_contiguous()):
        return None
    words = found.old(), found.new()
    at = [(w.ctypes.data, w.nbytes) for w in words if w is not None]
    same = at == [(tensor.data_ptr(), tensor.nbytes) for tensor in (old, new)]
    return (found.gaps, found.values) if same else None
