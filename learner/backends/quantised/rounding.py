"""What a quantised engine makes of weights, computed by torch where they lie.

The numbers are those of `storage/weights/`, which makes the codes that are published and undoes them, to the
bit. A matrix may be known in part: blocks are counted from its first row and column."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from storage.weights import int4
from storage.weights.fp8 import LARGEST, SMALLEST_SCALE, Blocks
from storage.weights.quantisation import Format, Int4Format, Shapes, refuse_unsuitable


@dataclass(frozen=True, slots=True)
class Rounding:
    """Says to which numbers engines have weights rounded."""

    found: Format
    published: torch.dtype
    """Type in which weights are quantised, `learner.publish_dtype`."""

    def refuse(self, shapes: Shapes) -> None:
        """Raise `ConfigError` for weights by these names that cannot be quantised so."""
        refuse_unsuitable(self.found, shapes)

    def scales(self, largest: Tensor) -> Tensor:
        """Return the scales of blocks, float32, by the largest magnitudes in them."""
        if isinstance(self.found, Int4Format):
            scales = _divided(largest.double(), int4.LARGEST).float().to(self.published).float()
            return torch.where(scales == 0, 1.0, scales)
        exact = _divided(largest.double(), LARGEST)
        if self.found.powers_of_two:
            fraction, exponent = torch.frexp(exact)
            exponent = torch.where(fraction == 0.5, exponent - 1, exponent)
            exact = torch.ldexp(torch.ones_like(exact), exponent)
        scales = exact.float().clamp(min=float(SMALLEST_SCALE))
        return torch.where(largest == 0, 1.0, scales)

    def rounded(self, values: Tensor, scales: Tensor) -> Tensor:
        """Return the values, float32, that the codes of `values` stand for with these scales."""
        if isinstance(self.found, Int4Format):
            return (values / scales).round().clamp(-8, 7) * scales
        codes = (values / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return codes.float() * scales

    def of_whole(self, matrix: Tensor) -> Tensor:
        """Return what engines have of a whole matrix, float32."""
        values, blocks = matrix.to(self.published).float(), self.found.blocks(tuple(matrix.shape))
        scales = self.scales(largest_magnitudes(values, 0, 0, blocks))
        return self.rounded(values, spread(scales, 0, 0, blocks, tuple(values.shape)))


def _divided(values: Tensor, divisor: float) -> Tensor:
    """Divide by a number; by one that is not on the device, CUDA would multiply by its rounded inverse."""
    return values / torch.full((), divisor, dtype=values.dtype, device=values.device)


def largest_magnitudes(values: Tensor, row: int, column: int, blocks: Blocks) -> Tensor:
    """Return the largest magnitude of each block that a part of a matrix touches, of that part alone.

    Args:
        values: [rows, columns] of the part, both at least 1.
        row: where its first row is in the matrix; `column` likewise.
        blocks: which elements of the matrix share a scale."""
    height, above, below = _cut(row, values.shape[0], blocks.rows)
    width, before, behind = _cut(column, values.shape[1], blocks.columns)
    padded = pad(values.abs(), (before, behind, above, below))
    rows, columns = padded.shape
    return padded.view(rows // height, height, columns // width, width).amax((1, 3))


def _cut(start: int, length: int, block: int) -> tuple[int, int, int]:
    """Return the length of blocks to cut a side into, and what it lacks before and behind to be whole."""
    before = start % block
    if before + length <= block:  # one block, however long the others are
        return length, 0, 0
    return block, before, -(before + length) % block


def spread(scales: Tensor, row: int, column: int, blocks: Blocks, sizes: tuple[int, ...]) -> Tensor:
    """Return the scale of each element of a part of these sizes, or a single one for all. The scales are of
    the blocks that it touches; `row` and `column` are where it begins in its matrix."""
    if scales.numel() == 1:
        return scales.reshape(())
    above, before = row % blocks.rows, column % blocks.columns
    by_row = scales.repeat_interleave(min(blocks.rows, above + sizes[0]), 0)[above : above + sizes[0]]
    return by_row.repeat_interleave(min(blocks.columns, before + sizes[1]), 1)[:, before : before + sizes[1]]
