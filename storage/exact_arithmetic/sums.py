"""Sums of products and of numbers that are exact, so that no order of addition can change their results.

Numbers are rounded to multiples of a unit, of a row or a column, in which they are integers. They are so
small that float64, with its 53 bits, holds every product and every partial sum exactly. Whatever a matrix
product does with its rows, blocks, threads and instructions, and on whatever processor, each entry has one
value; it is rounded once to float32.

Factors have 24 and 23 bits where 64 products are added up, 21 and 20 where 4,096 are, and 18 or 19 in
attention. Sums of 64 err as much as float32's, those of 4,096 six times and attention thirty times as much,
which is 5e-6 of its values. In a row with an element 100 times the others these lose seven bits more."""

import torch
from torch import Tensor

from storage.exact_arithmetic.elementary import power_of_two

BITS = 53
"""Bits of an integer that float64 holds."""
FRACTION_BITS = 35
"""Bits of fractions that are added up, at most 2^18 of them. It is one number for all sums, since that over a
kept set has to be that over the whole vocabulary in which the others are zero."""
MOST_FRACTIONS = 2 ** (BITS - FRACTION_BITS)
"""Most fractions that are added up exactly."""


def term_bits(terms: int) -> tuple[int, int]:
    """Return the bits that both factors of products may have, so many of which are added up."""
    free = BITS - (terms - 1).bit_length()
    return (free + 1) // 2, free // 2


def to_integers(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Round each row, along the last dimension, to integers of at most 2^bits: them and their unit [..., 1].
    Both are float64; the unit is a power of two."""
    exponent = torch.frexp(x.abs().amax(-1, keepdim=True)).exponent
    return (x.double() * power_of_two(bits - exponent)).round_(), power_of_two(exponent - bits)


def exact_sum(x: Tensor) -> Tensor:
    """Return the sums along the last dimension, float64 [..., 1]."""
    integers, unit = to_integers(x, BITS - (x.shape[-1] - 1).bit_length())
    return integers.sum(-1, keepdim=True) * unit


def sum_of_fractions(x: Tensor) -> Tensor:
    """Return the sums along the last dimension of numbers between 0 and 1, float64 [..., 1]; zeros among them
    change no result."""
    integers = (x.double() * 2.0**FRACTION_BITS).round_()
    return integers.sum(-1, keepdim=True) * 2.0**-FRACTION_BITS


class IntegerWeight:
    """A weight [N, K] whose rows are integers, ready for products."""

    def __init__(self, weight: Tensor) -> None:
        self.row_bits, bits = term_bits(weight.shape[1])
        self._integers, unit = to_integers(weight, bits)
        self._unit = unit[:, 0]

    def product(self, x: Tensor) -> Tensor:
        """Return x @ weight.t() of [..., K], float32 [..., N]."""
        rows, unit = to_integers(x, self.row_bits)
        return (rows @ self._integers.t()).mul_(unit).mul_(self._unit).float()
