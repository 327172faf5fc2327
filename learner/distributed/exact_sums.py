"""Sums over everything that a step trains on, whichever data-parallel rank has it."""

from collections.abc import Callable, Mapping, Sequence
from math import fsum

import numpy as np
from numpy.typing import NDArray

Rows = Mapping[str, Sequence[Sequence[float]]]
"""Rows of K numbers by name, such as those of a policy; each rank has its own rows, and its own names."""
SumsOverRanks = Callable[[Rows], dict[str, NDArray[np.float64]]]
"""Adds up the rows of each name over all ranks, [K]. Every rank calls it equally often in a step, also with
no rows."""


def exact_sums(rows: Rows) -> dict[str, NDArray[np.float64]]:
    """Add up the rows of each name, float64 [K]; of one rank.

    The sums are rounded once, so neither the order of the rows nor their division over ranks changes a bit:
    a step that is trained again on another number of ranks gets the same advantages."""
    return {
        name: np.array([fsum(column) for column in zip(*values, strict=True)])
        for name, values in rows.items()
        if values
    }


def joined(parts: Sequence[Rows]) -> dict[str, list[Sequence[float]]]:
    """Return the rows of all ranks by name."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: [row for part in parts for row in part.get(name, ())] for name in names}
