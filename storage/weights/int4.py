"""Arithmetic of 4-bit integers with a scale for each group of columns of a row.

A value is its code, from -8 to 7, times the scale of its group. Eight codes are packed in a word, the first
in the lowest bits, each with 8 added. The learner that publishes such weights, the engine that has to undo it
and the tools that convert files compute it here, so that all have the same bits."""

from concurrent.futures import Executor

import numpy as np
from numpy.typing import NDArray

from storage.weights.tensors import Floats, Words, in_order, narrowed, widened

GROUP = 128
"""Columns of a row that share a scale."""
PACKED_COLUMNS = 8
"""Columns in a word."""
LARGEST = 7.5
"""Half of the range from -8 to 7, to which the largest magnitude of a group is scaled."""
TASK_ELEMENTS = 1 << 20
"""Elements that are unpacked by a thread at a time."""
_SHIFTS = np.arange(0, 32, 4, dtype=np.uint32)


def largest_of_groups(values: Floats) -> Floats:
    """Return the largest magnitude of each group, [rows, groups]; NaN where there is one."""
    found: Floats = np.abs(values).reshape(len(values), -1, GROUP).max(axis=-1)
    return found


def group_scales(largest: Floats, dtype: str) -> Words:
    """Return the scales of groups as words of a dtype; 1 for groups of zeros."""
    words = narrowed(largest / np.float32(LARGEST), dtype)
    one = narrowed(np.ones(1, np.float32), dtype)
    return np.where(widened(words, dtype) == 0, one, words)


def packed(values: Floats, scales: Floats) -> NDArray[np.uint32]:
    """Return the packed codes of rows, [rows, words], by the scales of their groups, [rows, groups]."""
    divided = values.reshape(len(values), -1, GROUP) / scales[..., None]
    codes = np.rint(divided).clip(-8, 7).astype(np.int32) + 8
    shifted = codes.astype(np.uint32).reshape(len(values), -1, PACKED_COLUMNS) << _SHIFTS
    words: NDArray[np.uint32] = np.bitwise_or.reduce(shifted, axis=-1)
    return words


def unpacked(
    words: NDArray[np.uint32], scales: Floats, columns: int, threads: Executor | None = None
) -> Floats:
    """Return the float32 values of packed codes, [rows, columns], in groups as many as there are scales;
    `threads` share the rows."""
    values = np.empty((len(words), columns), np.float32)

    def unpack(rows: slice) -> None:
        codes = ((words[rows, :, None] >> _SHIFTS) & np.uint32(15)).reshape(
            -1, words.shape[1] * PACKED_COLUMNS
        )
        factors = np.repeat(scales[rows], columns // scales.shape[1], axis=1)
        np.multiply(codes[:, :columns].astype(np.float32) - 8, factors, out=values[rows])

    step = max(1, TASK_ELEMENTS // max(1, columns))
    for _ in in_order(threads, unpack, [slice(n, n + step) for n in range(0, len(words), step)]):
        pass
    return values
