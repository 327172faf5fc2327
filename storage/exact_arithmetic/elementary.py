"""Elementary functions whose results depend on their argument alone, to the bit.

A processor's exponential in a vector register is another program than the one for single numbers at the end
of an array, so that torch's own functions may give a number another last bit in another place. Here every
function is a sequence of operations that IEEE 754 rounds in one way only: addition, multiplication, division,
rounding to an integer, and shifts of exponents. None is fused with another, since each is a call of its own.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

PIECE = 2**15
"""Numbers that a CPU takes through all operations at a time: they stay in its caches."""
LARGEST_EXPONENT = 88.0
"""Arguments of `exp` are bounded by this, beyond which float32 overflows."""
LEAST_EXPONENT = -87.0
"""Arguments of `exp` below this have the result 0."""
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # a product with an exponent loses no bit
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_QUARTER_HIGH = float.fromhex("0x1.921fb544p+0")  # 33 bits of pi / 2
_QUARTER_LOW = float.fromhex("0x1.0b4611a626331p-34")
_SIN = tuple((-1) ** k / math.factorial(2 * k + 1) for k in range(9, -1, -1))
_COS = tuple((-1) ** k / math.factorial(2 * k) for k in range(9, -1, -1))
_ATANH = tuple(1 / (2 * k + 1) for k in range(15, -1, -1))


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2 to the integers, float64."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def exp(x: Tensor) -> Tensor:
    """Return the exponential of float32 numbers, to 2 units in the last place (Cephes)."""
    return _in_pieces(_exp, x)


def silu(x: Tensor) -> Tensor:
    """Return x / (1 + exp(-x)) of float32 numbers."""
    return _in_pieces(lambda piece: piece / _exp(-piece).add_(1.0), x)


def _exp(x: Tensor) -> Tensor:
    bounded = x.clamp(LEAST_EXPONENT, LARGEST_EXPONENT)
    whole = (bounded * 1.44269504088896341).round_()
    rest = bounded.sub_(whole * _LN2_HIGH).sub_(whole * _LN2_LOW)
    found = _polynomial(rest, _EXP).mul_(rest).mul_(rest).add_(rest).add_(1.0)
    doubled = ((whole.to(torch.int32) + 127) << 23).view(torch.float32)
    return found.mul_(doubled).masked_fill_(x < LEAST_EXPONENT, 0.0)


def log(x: Tensor) -> Tensor:
    """Return the logarithm of positive float64 numbers, to about 1e-15 of the larger of it and 1."""
    fraction, exponent = torch.frexp(x)
    ratio = (fraction - 1.0) / (fraction + 1.0)
    series = _polynomial(ratio * ratio, _ATANH) * (ratio * 2.0)
    return exponent.double() * math.log(2.0) + series


def cos_sin(angle: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of float32 angles of up to a million radians, float32."""
    wide = angle.double()
    quarters = (wide * (2 / math.pi)).round()
    rest = wide - quarters * _QUARTER_HIGH - quarters * _QUARTER_LOW
    square = rest * rest
    sin, cos = _polynomial(square, _SIN) * rest, _polynomial(square, _COS)
    turn = quarters.long() & 3
    is_odd = (turn & 1) == 1
    of_cos, of_sin = torch.where(is_odd, sin, cos), torch.where(is_odd, cos, sin)
    of_cos = torch.where((turn == 1) | (turn == 2), -of_cos, of_cos)
    of_sin = torch.where(turn >= 2, -of_sin, of_sin)
    return of_cos.float(), of_sin.float()


def reciprocal_sqrt(x: Tensor) -> Tensor:
    """Return 1 / sqrt(x) of float32 numbers. The root of a float32 number is farther from the middle between
    two others than any float64 root errs."""
    return x.double().sqrt().float().reciprocal()


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    found = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        found.add_(coefficient).mul_(x)
    return found.add_(coefficients[-1])


def _in_pieces(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if x.numel() <= PIECE or x.is_cuda:
        return function(x)
    found = torch.empty_like(x, memory_format=torch.contiguous_format)
    pieces = torch.split(x.reshape(-1), PIECE), torch.split(found.view(-1), PIECE)
    for given, place in zip(*pieces, strict=True):
        place.copy_(function(given))
    return found
