"""Gives a model, for a pass, the weights that quantised engines have.

The gradient of a pass is that of the rounded weights, and goes straight through to the others, which the
optimizer updates (arXiv:1308.3432, section 3; arXiv:1712.05877). Between passes the model has these others:
they are saved, exported, and quantised where they are published."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from learner.backends.quantised.rounding import Rounding, largest_magnitudes, spread
from learner.distributed.process_group import device
from storage.weights.fp8 import Blocks
from storage.weights.quantisation import is_quantised


@dataclass(frozen=True, slots=True, eq=False)
class WeightPart:
    """A rank's rows or columns of a matrix, by which ranks share it."""

    values: Tensor
    """View of the parameter whose elements are in the order of `sizes`."""
    sizes: tuple[int, int]
    shape: tuple[int, int]
    """Shape of the whole matrix."""
    row: int = 0
    """First of the part's rows in the matrix."""
    column: int = 0
    group: dist.ProcessGroup | None = None
    """The ranks that share the matrix; None for one that has all of it."""
    step: tuple[int, int] | None = None
    """Sizes of the parts of most ranks, where those of the last ones may be smaller."""


@dataclass(frozen=True, slots=True, eq=False)
class Mixed:
    """A rank's share of a tensor that is made of matrices in a way that no cut through one of them tells."""

    values: Tensor
    """The parameter, or this rank's part of it."""
    gathered: Callable[[], Mapping[str, Tensor]]
    """Returns the whole matrices by their Hugging Face names. All ranks that share them call it."""
    share_of: Callable[[Mapping[str, Tensor]], Tensor]
    """Returns this rank's share of the tensor made of these matrices."""


class RoundedWeights:
    """The weights of a model on this rank, and what engines make of them."""

    def __init__(
        self, rounding: Rounding, parts: Sequence[WeightPart], mixed: Sequence[Mixed], dtype: torch.dtype
    ) -> None:
        """Take all matrices that are quantised; `dtype` is the one in which they are computed with."""
        self._rounding, self._dtype = rounding, dtype
        self._parts = [part for part in parts if part.values.numel() or self._is_exchanged(part)]
        self._mixed = mixed

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model have the weights of engines while inside, and its own again afterwards. Nothing may
        read or write the parameters besides passes. Every rank calls this."""
        places = [part.values for part in self._parts] + [mixed.values for mixed in self._mixed]
        with torch.no_grad():
            own = [place.clone() for place in places]
            self._round()
        try:
            yield
        finally:
            with torch.no_grad():
                for place, values in zip(places, own, strict=True):
                    place.copy_(values)

    def _round(self) -> None:
        for part, scales in zip(self._parts, self._scales(), strict=True):
            if part.values.numel():
                each = spread(scales, part.row, part.column, self._blocks(part), part.sizes)
                rounded = self._rounding.rounded(self._source(part), each)
                part.values.copy_(rounded.view(part.values.shape))
        for mixed in self._mixed:
            matrices = {
                name: self._rounding.of_whole(matrix) if is_quantised(name, tuple(matrix.shape)) else matrix
                for name, matrix in mixed.gathered().items()
            }
            mixed.values.copy_(mixed.share_of(matrices))

    def _scales(self) -> list[Tensor]:
        found = [self._largest(part) for part in self._parts]
        for group in dict.fromkeys(part.group for part in self._parts if part.group is not None):
            shared = [
                number
                for number, part in enumerate(self._parts)
                if part.group is group and self._is_exchanged(part)
            ]
            for number, largest in zip(shared, self._of_all_ranks(shared, found, group), strict=True):
                found[number] = largest
        return [self._rounding.scales(largest) for largest in found]

    def _of_all_ranks(
        self, numbers: Sequence[int], found: Sequence[Tensor], group: dist.ProcessGroup
    ) -> Iterator[Tensor]:
        """Yield the largest magnitudes of blocks of which other ranks of a group have parts, too."""
        wholes = []
        for number in numbers:
            part = self._parts[number]
            whole = torch.zeros(self._blocks(part).counts(part.shape), device=device())
            whole[self._touched(part)] = found[number]
            wholes.append(whole)
        if not wholes:
            return
        every = torch.cat([whole.flatten() for whole in wholes])
        dist.all_reduce(every, dist.ReduceOp.MAX, group)
        pieces = torch.split(every, [whole.numel() for whole in wholes])
        for number, whole, piece in zip(numbers, wholes, pieces, strict=True):
            yield piece.view(whole.shape)[self._touched(self._parts[number])]

    def _largest(self, part: WeightPart) -> Tensor:
        if not part.values.numel():
            return torch.zeros(0, 0, device=device())
        return largest_magnitudes(self._source(part), part.row, part.column, self._blocks(part))

    def _source(self, part: WeightPart) -> Tensor:
        values = part.values.to(device(), self._dtype).reshape(part.sizes)
        return values.to(self._rounding.published).float()

    def _blocks(self, part: WeightPart) -> Blocks:
        return self._rounding.found.blocks(part.shape)

    def _touched(self, part: WeightPart) -> tuple[slice, slice]:
        blocks = self._blocks(part)
        rows = slice(part.row // blocks.rows, -(-(part.row + part.sizes[0]) // blocks.rows))
        columns = slice(part.column // blocks.columns, -(-(part.column + part.sizes[1]) // blocks.columns))
        return (rows, columns) if part.values.numel() else (slice(0), slice(0))

    def _is_exchanged(self, part: WeightPart) -> bool:
        """Tell whether blocks lie across the parts of several ranks: on all of them, or on none."""
        if part.group is None:
            return False
        blocks, (rows, columns) = self._blocks(part), part.step or part.sizes
        cuts_rows, cuts_columns = rows < part.shape[0], columns < part.shape[1]
        return (cuts_rows and rows % blocks.rows > 0) or (cuts_columns and columns % blocks.columns > 0)
