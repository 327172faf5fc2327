"""Counts what of a group's trajectories is computed where a beginning that several have is computed once."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bus.config import LEAST_SHARED


def different_beginnings(sequences: Sequence[NDArray[np.int32]], *, least: int = LEAST_SHARED) -> int:
    """Count the different beginnings of these sequences, of one token and more: so many tokens go through a
    model that computes each of them once.

    In lexicographic order each sequence has more in common with its neighbours than with any other. What is
    less than `least` tokens in common counts for each."""
    # Bytes of big-endian numbers are in the order of the numbers.
    ordered = sorted(sequences, key=lambda tokens: tokens.astype(">i4").tobytes())
    common = (common_length(before, after) for before, after in pairwise(ordered))
    return sum(map(len, sequences)) - sum(length for length in common if length >= least)


def common_length(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Return the number of tokens that both begin with."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length
