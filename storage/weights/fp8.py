"""Arithmetic of 8-bit floats (e4m3fn, arXiv:2209.05433) with a float32 scale for each block of a matrix.

A value is its code's value times the scale of its block. The learner that publishes such weights, the engine
that has to undo it and the tools that convert files compute it here, so that all have the same bits. Nothing
depends on how ranks divide a matrix: blocks are counted from its first row and column."""

from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bus.errors import StorageError
from storage.weights.tensors import in_order

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]
LARGEST = 448.0
"""Largest value of e4m3fn, which has no infinity."""
SMALLEST_SCALE = np.float32(2.0**-126)
"""Smallest normal number of float32: a scale below it would lose its digits."""
PIECE_ELEMENTS = 1 << 15
"""Elements that are encoded at a time: what that takes besides stays in the processor's cache."""
TASK_ELEMENTS = 1 << 20
"""Elements that are dequantised by a thread at a time."""
_LARGEST_CODE = 0x7E
_SMALLEST_NORMAL = np.float32(2.0**-6)
"""Smallest normal number of e4m3fn; below it lie multiples of 2^-9."""
_DROPPED_BITS = 20
"""Bits of the fraction that float32 has and e4m3fn has not."""
_REBIAS = np.uint32((127 - 7) << 3)
"""Difference of the exponents' biases, in codes."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Says which elements of a matrix share a scale."""

    rows: int
    columns: int

    def counts(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the number of blocks along both sides; those at the end may be smaller."""
        rows, columns = shape
        return -(-rows // self.rows), -(-columns // self.columns)


def codes_of(values: Floats) -> Codes:
    """Return the nearest e4m3fn of each finite value, ties to even; larger ones become +-448."""
    bits, magnitude = values.view(np.uint32), np.abs(values)
    codes = magnitude.view(np.uint32) >> np.uint32(_DROPPED_BITS)
    codes &= np.uint32(1)  # whether what is kept is odd
    codes += np.uint32((1 << (_DROPPED_BITS - 1)) - 1)
    codes += magnitude.view(np.uint32)
    codes >>= np.uint32(_DROPPED_BITS)
    codes -= _REBIAS
    np.minimum(codes, np.uint32(_LARGEST_CODE), out=codes)
    small = magnitude < _SMALLEST_NORMAL
    if small.any():
        codes[small] = np.rint(magnitude[small] * np.float32(512.0)).astype(np.uint32)
    found = codes.astype(np.uint8)
    found |= (bits >> np.uint32(24)).astype(np.uint8) & np.uint8(0x80)
    return found


def _values() -> Floats:
    codes = np.arange(256)
    exponent, fraction = (codes >> 3) & 15, codes & 7
    normal = (1 + fraction / 8) * np.exp2(exponent - 7.0)
    magnitude = np.where(exponent > 0, normal, fraction * 2.0**-9)
    magnitude[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes & 0x80, -magnitude, magnitude).astype(np.float32)


VALUES = _values()
"""float32 [256], the value of each code."""


def largest_magnitudes(values: Floats, columns: int) -> Floats:
    """Return the largest magnitude of every `columns` columns of a matrix; NaN where there is one."""
    return np.maximum.reduceat(np.abs(values).max(axis=0), np.arange(0, values.shape[1], columns))


def scales_of(largest: Floats, *, powers_of_two: bool) -> Floats:
    """Return the scales that make the largest magnitudes of blocks 448; 1 for blocks of zeros. With
    `powers_of_two` (ue8m0) a scale is the next power of two that is not smaller."""
    exact = largest.astype(np.float64) / LARGEST
    if powers_of_two:
        fraction, exponent = np.frexp(exact)
        exact = np.exp2(np.where(fraction == 0.5, exponent - 1, exponent).astype(np.float64))
    scales = np.maximum(exact.astype(np.float32), SMALLEST_SCALE)
    return np.where(largest == 0, np.float32(1.0), scales)


def encoded(values: Floats, scales: Floats, columns: int) -> Codes:
    """Return the codes of rows that lie in one row of blocks, whose scales are given."""
    codes, width = np.empty(values.shape, np.uint8), values.shape[1]
    divisors = _spread(scales, columns, width)
    step = max(1, PIECE_ELEMENTS // max(1, width))
    for start in range(0, len(values), step):
        rows = slice(start, start + step)
        codes[rows] = codes_of(values[rows] / divisors)
    return codes


def dequantised(codes: Codes, scales: Floats, blocks: Blocks, threads: Executor | None = None) -> Floats:
    """Return the values of a matrix of codes, float32 [rows, columns].

    Args:
        codes: [rows, columns].
        scales: one for each block, [rows of blocks, columns of blocks], or a single one for all.
        blocks: which elements share a scale; it does not matter where there is a single one.
        threads: share the rows.
    Raises `StorageError` for scales of another shape."""
    single = scales.size == 1
    if not single and scales.shape != blocks.counts(codes.shape):
        raise StorageError(
            f"scales of shape {list(scales.shape)} do not fit a weight of {list(codes.shape)} in blocks of "
            f"{blocks.rows} x {blocks.columns}: it needs {list(blocks.counts(codes.shape))}"
        )
    values = np.empty(codes.shape, np.float32)

    def undo(numbers: range) -> None:
        for number in numbers:
            rows = slice(number * blocks.rows, (number + 1) * blocks.rows)
            factors = scales.reshape(1) if single else _spread(scales[number], blocks.columns, codes.shape[1])
            np.multiply(VALUES[codes[rows]], factors, out=values[rows])  # looking codes up takes 8 bytes each

    count = blocks.counts(codes.shape)[0]
    step = max(1, TASK_ELEMENTS // max(1, blocks.rows * codes.shape[1]))
    for _ in in_order(threads, undo, [range(n, min(n + step, count)) for n in range(0, count, step)]):
        pass
    return values


def _spread(scales: Floats, columns: int, width: int) -> Floats:
    return np.repeat(scales, columns)[:width]
