"""Brings matrices together whose parts several ranks update, and sends back what becomes of them.

Each tensor has one owner among the ranks that update a part of it, so that the work on matrices is shared
like the state of the optimizer. Owners work in rounds, on so many tensors at a time that the memory for whole
ones is bounded."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from learner.distributed.process_group import device

ROUND_ELEMENTS = 2**26
"""Elements of the whole tensors that an owner puts together at a time, a larger one by itself, and of the
matrices of one shape whose steps it computes at a time."""


class Piece(NamedTuple):
    """The part of a tensor that a rank updates: a range of the elements of one of its slices, row by row."""

    tensor: str
    rank: int
    """Number of the rank in the world."""
    slice: int
    start: int
    stop: int


class StoredMatrices(Protocol):
    """A tensor as the backend stores it, in slices, and the matrices that it is made of."""

    @property
    def slice_shapes(self) -> Sequence[tuple[int, ...]]:
        """Return the shapes of all its slices."""

    def matrices(self, slices: Sequence[Tensor]) -> list[Tensor]:
        """Return the matrices in the slices."""

    def slices(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Undo `matrices`."""


class _Job(NamedTuple):
    owner: int
    pieces: list[Piece]


class MatrixExchange:
    """Turns the parts of matrices that the ranks have into parts of the steps that they make as wholes."""

    def __init__(
        self, pieces: Sequence[Piece], tensors: Mapping[str, StoredMatrices],
        steps: Callable[[Tensor], Tensor],
    ) -> None:  # fmt: skip
        """Share the work.

        Args:
            pieces: of all ranks, in an order that is the same on each.
            tensors: at least those of which this rank has a piece.
            steps: from [n, rows, columns], n matrices of one shape, to the steps that they make."""
        self._tensors, self._steps = tensors, steps
        self._rounds = _rounds(pieces)
        for owner, those in (job for jobs in self._rounds for job in jobs):
            if owner == dist.get_rank():
                self._refuse_gaps(those)

    def _refuse_gaps(self, pieces: Sequence[Piece]) -> None:
        """Raise `ValueError` where ranks update less or more than all of a tensor, or some of it twice."""
        name = pieces[0].tensor
        ends = [(each.slice, end) for each in sorted(pieces, key=_place) for end in (each.start, each.stop)]
        for number, shape in enumerate(self._tensors[name].slice_shapes):
            found = [end for of, end in ends if of == number]
            if not (found[::2] == [0, *found[1:-1:2]] and found[-1:] == [math.prod(shape)]):
                raise ValueError(
                    f"the pieces of slice {number} of {name}, {found}, do not make {list(shape)}"
                )

    def steps(self, direction: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield for each tensor of which this rank has a piece that of its step, float32 [n].

        Every rank that has pieces exhausts this. `direction` returns what this rank has of a tensor, which it
        no longer needs."""
        here = dist.get_rank()
        for jobs in self._rounds:
            mine = {
                piece.tensor: direction(piece.tensor).reshape(-1)
                for job in jobs
                for piece in job.pieces
                if piece.rank == here
            }
            owned = {
                job.pieces[0].tensor: [
                    torch.empty(shape, dtype=torch.float32, device=device())
                    for shape in self._tensors[job.pieces[0].tensor].slice_shapes
                ]
                for job in jobs
                if job.owner == here
            }
            _move(jobs, mine, owned, to_owner=True)
            self._replace_by_steps(owned)
            _move(jobs, mine, owned, to_owner=False)
            yield from mine.items()

    def _replace_by_steps(self, owned: dict[str, list[Tensor]]) -> None:
        found = {name: self._tensors[name].matrices(owned.pop(name)) for name in list(owned)}
        self._overwrite_by_steps([matrix for matrices in found.values() for matrix in matrices])
        for name in list(found):  # each is let go before the next is put together
            owned[name] = [each.contiguous() for each in self._tensors[name].slices(found.pop(name))]

    def _overwrite_by_steps(self, matrices: Sequence[Tensor]) -> None:
        alike: dict[torch.Size, list[Tensor]] = {}
        for matrix in matrices:
            alike.setdefault(matrix.shape, []).append(matrix)
        for shape, those in alike.items():
            at_a_time = max(1, ROUND_ELEMENTS // shape.numel())
            for start in range(0, len(those), at_a_time):
                stacked = those[start : start + at_a_time]
                for matrix, step in zip(stacked, self._steps(torch.stack(stacked)), strict=True):
                    matrix.copy_(step)


def _place(piece: Piece) -> tuple[int, int]:
    return piece.slice, piece.start


def _move(
    jobs: Sequence[_Job], mine: Mapping[str, Tensor], owned: Mapping[str, Sequence[Tensor]], *, to_owner: bool
) -> None:
    here = dist.get_rank()
    operations = []
    for owner, pieces in jobs:
        for piece in pieces:
            if here not in (owner, piece.rank):
                continue
            ends = []  # at the owner, at the rank that updates the piece
            if here == owner:
                ends.append(owned[piece.tensor][piece.slice].view(-1)[piece.start : piece.stop])
            if here == piece.rank:
                ends.append(mine[piece.tensor])
            if len(ends) == 2:
                ends[not to_owner].copy_(ends[to_owner])
                continue
            receives = (here == owner) == to_owner
            peer = piece.rank if here == owner else owner
            operations.append(dist.P2POp(dist.irecv if receives else dist.isend, ends[0], peer))
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def _rounds(pieces: Sequence[Piece]) -> list[list[_Job]]:
    """Give each tensor to the rank among its own that has the least to do, and cut the work into rounds."""
    by_tensor: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_tensor.setdefault(piece.tensor, []).append(piece)
    load: dict[int, int] = {}
    rounds: dict[int, list[_Job]] = {}
    for those in by_tensor.values():
        owner = min((piece.rank for piece in those), key=lambda rank: (load.get(rank, 0), rank))
        elements = sum(piece.stop - piece.start for piece in those)
        load[owner] = load.get(owner, 0) + elements
        number = math.ceil(load[owner] / ROUND_ELEMENTS)
        rounds.setdefault(number, []).append(_Job(owner, those))
    return [rounds[number] for number in sorted(rounds)]
