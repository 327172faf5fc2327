"""Published weights divided among the hosts of all ranks: each has some of the tensors, whole.

Each rank finds on its device what changed in the part of the model that it trains, by a copy of what it found
before, and sends places and new values to the ranks that have these tensors. So no rank has more than its
share, and what travels between ranks is what changed."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from learner.backends.contract.backend import Exported, ExportedPiece
from learner.distributed.process_group import device, gathered, most_over_ranks
from learner.host_memory.copies import INTEGERS, NAMES, host_memory, host_tensors
from storage.weights.tensors import HostTensor

Pieces = Sequence[ExportedPiece]
CHUNK_ELEMENTS = {"cuda": 1 << 25, "cpu": 1 << 20}
"""Elements that are compared at a time; on a CPU they stay in its caches."""
ROUND_ELEMENTS = 1 << 25
"""Elements among which changes are found before they are exchanged."""
WAITING_CHANGES = 1 << 24
"""Changes that may wait to be written into the tensors beside training; the first version has more."""


class DividedWeights:
    """The tensors that this rank has of the published weights, twice: the two sets take turns."""

    def __init__(self, weights: Exported, dtype: torch.dtype) -> None:
        """Divide tensors of these shapes, which are published as `dtype` or as what is exact of them. Every
        rank calls this."""
        pieces, shapes = weights.pieces or (), weights.shapes
        dtypes = {name: weights.exact.get(name, dtype) for name in shapes}
        self.shapes = shapes
        self.kinds = {name: (NAMES[dtypes[name]], tuple(shape)) for name, shape in shapes.items()}
        """Dtype and shape of every tensor, whoever has it."""
        self.holders = dict.fromkeys(shapes, 0)
        """Rank that has each tensor. Those that are in no piece do not change, and are read on rank 0."""
        changing = {name for of_rank in gathered({n for p in pieces for n in p.names}) for name in of_rank}
        self._of_dtypes: list[_OfDtype] = []
        for each in dict.fromkeys(dtypes[name] for name in shapes if name in changing):
            some = {name: shapes[name] for name in shapes if name in changing and dtypes[name] == each}
            numbers = [number for number, piece in enumerate(pieces) if piece.names[0] in some]
            self._of_dtypes.append(_OfDtype(each, some, pieces, numbers))
            self.holders |= self._of_dtypes[-1].holders
        self._fixed: dict[str, HostTensor] = {}
        self._unchanging: object = None
        self._dtypes = dtypes

    def take(self, weights: Exported, turn: int) -> None:
        """Find what changed since the call before, and exchange it. Every rank calls this."""
        for each in self._of_dtypes:
            each.take(weights.pieces or (), turn)
        if self._unchanging != weights.unchanging:
            found = weights.unchanging() if dist.get_rank() == 0 else ()
            copies = {name: tensor.to("cpu", self._dtypes[name], copy=True) for name, tensor in found}
            self._fixed = host_tensors({name: tensor.contiguous() for name, tensor in copies.items()})
            self._unchanging = weights.unchanging

    def arrived(self, turn: int) -> Mapping[str, HostTensor]:
        """Write what `take` received into the set whose turn it is, on any thread; return its tensors."""
        found = dict(self._fixed)
        for each in self._of_dtypes:
            found |= each.arrived(turn)
        return {name: found[name] for name in self.shapes if name in found}


def holders_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the rank that has each tensor, whole, where ranks have equally many elements as far as may be.
    Each has tensors that follow one another."""
    ranks, sizes = dist.get_world_size(), [prod(shape) for shape in shapes.values()]
    ends = list(accumulate(sizes))
    middles = [end - size // 2 for size, end in zip(sizes, ends, strict=True)]
    return {
        name: min(middle * ranks // max(1, ends[-1]), ranks - 1)
        for name, middle in zip(shapes, middles, strict=True)
    }


class _OfDtype:
    """Tensors of one dtype, whose elements are counted through and divided among the ranks."""

    def __init__(
        self, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]], pieces: Pieces,
        numbers: Sequence[int],
    ) -> None:  # fmt: skip
        """Divide tensors of these shapes; the pieces with these `numbers` are of them."""
        ranks, sizes = dist.get_world_size(), [prod(shape) for shape in shapes.values()]
        ends = list(accumulate(sizes, initial=0))
        firsts = dict(zip(shapes, ends, strict=False))
        self.holders = holders_of(shapes)
        bounds = [0, *([ends[-1]] * ranks)]
        for name, holder in reversed(self.holders.items()):
            bounds[1 : holder + 1] = [min(bound, firsts[name]) for bound in bounds[1 : holder + 1]]
        self._bounds = bounds
        chunks = [_Chunk(dtype, some, pieces, firsts, self.holders) for some in _cut(pieces, numbers)]
        begin = len(chunks) * dist.get_rank() // ranks  # else all ranks would send to one at a time
        self._chunks = chunks[begin:] + chunks[:begin]
        self._a_round = ROUND_ELEMENTS // CHUNK_ELEMENTS[device().type]
        self._rounds = most_over_ranks(-(-len(self._chunks) // self._a_round))
        first, end = bounds[dist.get_rank()], bounds[dist.get_rank() + 1]
        memory = host_memory([((end - first,), dtype)] * 2, page_locked=False)
        self._sets = [each.view(INTEGERS[dtype.itemsize]) for each in memory]
        mine = [name for name, holder in self.holders.items() if holder == dist.get_rank()]
        self._tensors = [
            host_tensors(
                {name: each[firsts[name] - first :][: prod(shapes[name])].view(shapes[name]) for name in mine}
            )
            for each in memory
        ]
        self._waiting: list[_Changes] = []
        """What the set whose turn it is lacks."""
        self._newest: list[_Changes] | None = []
        """What that version changed, which the other set will lack; None where that is too much to keep."""

    @torch.no_grad()
    def take(self, pieces: Pieces, turn: int) -> None:
        if self._newest is None:
            self._sets[turn].copy_(self._sets[1 - turn])
        self._waiting, self._newest = [*(self._newest or ())], []
        for number in range(self._rounds):
            sent = [[_Changes.none(self._sets[0].dtype)] for _ in range(dist.get_world_size())]
            for chunk in self._chunks[number * self._a_round :][: self._a_round]:
                chunk.find(pieces, self._bounds, sent)
            for places, words in _exchanged(sent):
                changes = _Changes(places - self._bounds[dist.get_rank()], words)
                self._waiting.append(changes)
                if self._newest is not None:
                    self._newest.append(changes)
                if sum(len(each.places) for each in self._waiting) > WAITING_CHANGES:
                    self._write(turn)
                    self._newest = None

    def arrived(self, turn: int) -> Mapping[str, HostTensor]:
        self._write(turn)
        return self._tensors[turn]

    def _write(self, turn: int) -> None:
        for places, words in self._waiting:
            self._sets[turn][places] = words
        self._waiting.clear()


class _Changes(NamedTuple):
    places: Tensor
    """int64 [n]."""
    words: Tensor
    """[n], integers of the size of the dtype."""

    @classmethod
    def none(cls, words: torch.dtype) -> "_Changes":
        return cls(*(torch.empty(0, dtype=dtype, device=device()) for dtype in (torch.int64, words)))


Rows = tuple[int, slice]
"""Number of a piece, and some of its rows."""


def _cut(pieces: Pieces, numbers: Sequence[int]) -> Iterator[list[Rows]]:
    """Yield the rows of pieces with these numbers, as many elements as are compared at a time or a little
    more."""
    chunk: list[Rows] = []
    elements, wanted = 0, CHUNK_ELEMENTS[device().type]
    for number in numbers:
        rows, width = pieces[number].rows.shape
        most = -(-wanted // max(1, width))
        for start in range(0, rows, most):
            place = slice(start, min(start + most, rows))
            chunk.append((number, place))
            elements += (place.stop - start) * width
            if elements >= wanted:
                yield chunk
                chunk, elements = [], 0
    if chunk:
        yield chunk


class _Chunk:
    """Rows that are compared together, the words that they had, and where these are among all elements."""

    def __init__(
        self, dtype: torch.dtype, parts: list[Rows], pieces: Pieces,
        firsts: Mapping[str, int], holders: Mapping[str, int],
    ) -> None:  # fmt: skip
        self._dtype = dtype
        self._parts = parts
        names = {name for number, _ in parts for name in pieces[number].names}
        self._holders = sorted({holders[name] for name in names})
        end, runs = 0, list[Tensor]()
        for number, place in parts:
            piece, width = pieces[number], pieces[number].rows.shape[1]
            of_tensor = torch.tensor([firsts[name] for name in piece.names])
            starts = piece.starts[place] + of_tensor[piece.tensors[place]]
            begins = end + torch.arange(len(starts)) * width
            run = torch.stack((begins, starts - begins * piece.step, torch.full_like(starts, piece.step)))
            goes_on = (starts.diff(prepend=starts[:1]) == width) & (piece.step == 1)
            runs.append(run[:, ~goes_on])
            end += len(starts) * width
        self._begins, self._shifts, self._steps = torch.cat(runs, 1).to(device())
        """Where runs of elements begin whose places follow one another, and what makes places of elements."""
        self._by_one = bool((self._steps == 1).all())
        self._kept = torch.zeros(end, dtype=INTEGERS[dtype.itemsize], device=device())

    def find(self, pieces: Pieces, bounds: Sequence[int], into: Sequence[list[_Changes]]) -> None:
        """Find what changed since the call before, for each rank that has some of it."""
        rows = [
            _published(pieces[number], place).to(self._dtype).reshape(-1) for number, place in self._parts
        ]
        new = (rows[0] if len(rows) == 1 else torch.cat(rows)).view(self._kept.dtype)
        found = _differing(new, self._kept)
        words = new[found]
        self._kept.copy_(new)
        counts = torch.searchsorted(found, self._begins).diff(append=found.new_tensor([len(found)]))
        if not self._by_one:
            found = found * self._steps.repeat_interleave(counts, output_size=len(found))
        places = found + self._shifts.repeat_interleave(counts, output_size=len(found))
        if len(self._holders) == 1:
            into[self._holders[0]].append(_Changes(places, words))
            return
        spans = list(pairwise(bounds))
        for holder in self._holders:
            first, end = spans[holder]
            theirs = (places >= first) & (places < end)
            into[holder].append(_Changes(places[theirs], words[theirs]))


def _published(piece: ExportedPiece, place: slice) -> Tensor:
    rows = piece.rows[place] if piece.made is None else piece.made(place)
    return rows.to(device(), piece.dtype)


def _differing(new: Tensor, old: Tensor) -> Tensor:
    if new.is_cuda:
        return (new != old).nonzero()[:, 0]
    return torch.from_numpy(np.flatnonzero(new.numpy() != old.numpy()))  # in a quarter of torch's time


def _exchanged(sent: Sequence[Sequence[_Changes]]) -> Iterator[_Changes]:
    """Send each rank its changes; yield those of all ranks for this one, on the host.

    A rank receives about `ROUND_ELEMENTS` at a time and no more: of the first version everything is new, and
    what the ranks compare at a moment often belongs to one of them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    every = [_Changes(*map(torch.cat, zip(*changes, strict=True))) for changes in sent]
    ours = torch.tensor([len(each.places) for each in every], device=device())
    of_all = ours.new_empty(ranks, ranks)
    dist.all_gather(list(of_all), ours)
    counts = of_all.cpu()  # from each rank to each
    turns = max(1, -(-int(counts.sum(0).max()) // ROUND_ELEMENTS))
    for turn in range(turns):
        firsts, ends = counts * turn // turns, counts * (turn + 1) // turns
        places = [slice(*place) for place in zip(firsts[rank].tolist(), ends[rank].tolist(), strict=True)]
        sizes = (ends - firsts)[:, rank].tolist()
        going = ([each[n][place] for each, place in zip(every, places, strict=True)] for n in range(2))
        yield _Changes(*(_passed(values, sizes) for values in going))


def _passed(values: list[Tensor], sizes: Sequence[int]) -> Tensor:
    item = values[0].element_size()  # bytes, since NCCL has no 16-bit integers
    received = torch.empty(sum(sizes) * item, dtype=torch.uint8, device=device())
    coming, going = ([size * item for size in each] for each in (sizes, map(len, values)))
    dist.all_to_all_single(received, torch.cat(values).view(torch.uint8), coming, going)
    return received.view(values[0].dtype).cpu()
