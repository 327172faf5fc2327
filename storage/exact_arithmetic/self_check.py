"""Looks at the start whether this machine's arithmetic is what exact arithmetic takes it for."""

import torch

from bus.errors import ConfigError
from storage.exact_arithmetic.elementary import cos_sin, exp, reciprocal_sqrt, silu
from storage.exact_arithmetic.sums import BITS, IntegerWeight, term_bits

TERMS = 300
"""Factors of the products that are compared: more than a vector register, a tile or a thread takes."""
PLACES = 61
"""Numbers in an array that functions are compared in; it is no multiple of a vector register."""


def refuse_other_arithmetic(device: torch.device) -> None:
    """Raise `ConfigError` where products of integers are not exact, or numbers depend on their neighbours."""
    draw = torch.Generator().manual_seed(0)
    _refuse_inexact_products(device, draw)
    for function in (exp, silu, reciprocal_sqrt, cos_sin):
        numbers = torch.rand(PLACES, generator=draw).to(device) * 20
        together = function(numbers)
        alone = [function(numbers[n : n + 1]) for n in range(PLACES)]
        parts = zip(*alone, strict=True) if isinstance(together, tuple) else [alone]
        of_all = together if isinstance(together, tuple) else [together]
        for found, each in zip(of_all, parts, strict=True):
            if not torch.equal(found, torch.cat(list(each))):
                raise _refusal(f"{function.__name__} of a number depends on its place in an array", device)
    weight, rows = torch.randn(PLACES, TERMS, generator=draw), torch.randn(PLACES, TERMS, generator=draw)
    product = IntegerWeight(weight.to(device))
    together = product.product(rows.to(device))
    if not torch.equal(together[7:8], product.product(rows[7:8].to(device))):
        raise _refusal("a row of a matrix product depends on the other rows", device)


def _refuse_inexact_products(device: torch.device, draw: torch.Generator) -> None:
    """Compare products of the largest integers there may be with those of Python."""
    row_bits, column_bits = term_bits(TERMS)
    rows, columns = (
        torch.randint(2**bits - 2**8, 2**bits, (5, TERMS), generator=draw) for bits in (row_bits, column_bits)
    )
    found = rows.double().to(device) @ columns.double().to(device).t()
    for row, values in zip(rows.tolist(), found.tolist(), strict=True):
        for column, value in zip(columns.tolist(), values, strict=True):
            if int(value) != sum(a * b for a, b in zip(row, column, strict=True)):
                raise _refusal(f"a float64 matrix product of integers below 2^{BITS} is not exact", device)


def _refusal(problem: str, device: torch.device) -> ConfigError:
    return ConfigError(
        f"model.numerics=exact does not work on this machine ({device.type}, torch {torch.__version__}): "
        f"{problem}; set model.numerics=fast"
    )
