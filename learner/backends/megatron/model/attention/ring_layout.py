"""What each context-parallel rank sees of the keys of every other, and what it sends them, step by step.

Sequences are cut zig-zag (learner/backends/megatron/model/attention/context_attention.py). In step i a rank
has the keys and values of the rank i before it, and of those only what its queries see: all of its own, from
ranks before it the first half of each sequence's share, from ranks behind it both halves for the second half
of its queries. Every step has the same work. With a sliding window it is what lies within, mostly nothing.

Whatever is seen is cut into rectangles, in which each query sees each key, and triangles, in which query n
sees keys 0 to n; a kernel for causal attention takes both, and needs no mask. At the far edge of a window
query n sees keys n and up, which is a triangle when read backwards."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from learner.backends.megatron.model.attention.context_attention import chunks_of_rank
from learner.backends.megatron.model.attention.key_sets import KeySets, key_sets
from learner.host_memory.copies import to_device

RowIndex = Tensor | slice
"""Numbers of tokens: int64, or a slice where they follow each other."""


@dataclass(frozen=True, slots=True)
class Block:
    """Sets of keys in which no query and no key comes twice."""

    sets: KeySets
    queries: RowIndex
    """This rank's tokens that are queries, run by run."""
    keys: RowIndex
    """Keys by their place among those that arrive in this step, run by run."""

    def to(self, device: torch.device) -> "Block":
        return Block(self.sets.to(device), _moved(self.queries, device), _moved(self.keys, device))


@dataclass(frozen=True, kw_only=True, slots=True)
class RingStep:
    """What a rank computes with the keys of one rank, and what it sends to another before."""

    blocks: tuple[Block, ...]
    source: int
    """The rank whose keys these are."""
    arriving: int
    """Number of its keys that come."""
    target: int
    """The rank that gets keys of this one in the same step."""
    sent: RowIndex
    """Which of this rank's keys it gets."""
    leaving: int
    """Number of these."""

    def to(self, device: torch.device) -> "RingStep":
        return replace(
            self, blocks=tuple(block.to(device) for block in self.blocks), sent=_moved(self.sent, device)
        )


class RingLayout:
    """The steps of one rank for the sequences of a micro-batch, for each window that layers have."""

    def __init__(self, lengths: Sequence[int], *, ranks: int, rank: int, device: torch.device) -> None:
        """Take the lengths of the sequences, each a multiple of 2 * ranks."""
        self._lengths = tuple(lengths)
        self._ranks, self._rank, self._device = ranks, rank, device
        self._steps: dict[int | None, tuple[RingStep, ...]] = {}

    def steps(self, window: int | None) -> tuple[RingStep, ...]:
        """Return as many steps as there are ranks, the first of which is with the rank's own keys. `window`
        is the number of tokens that a query sees, its own the last of them; None is all before it."""
        if window is not None and window >= max(self._lengths):
            window = None
        if window not in self._steps:
            self._steps[window] = tuple(
                self._step(distance, window).to(self._device) for distance in range(self._ranks)
            )
        return self._steps[window]

    def _step(self, distance: int, window: int | None) -> RingStep:
        source, target = ((self._rank + shift) % self._ranks for shift in (-distance, distance))
        blocks = self._seen(self._rank, source, window)
        needed = self._needed(blocks)
        sent = self._needed(self._seen(target, self._rank, window))
        return RingStep(
            blocks=tuple(_block(pieces, needed) for pieces in blocks),
            source=source,
            arriving=int(needed.sum()),
            target=target,
            sent=_rows(sent.nonzero()[:, 0]),
            leaving=int(sent.sum()),
        )

    def _seen(self, rank: int, source: int, window: int | None) -> list[list["_Piece"]]:
        """Return what a rank sees of the keys of another; in each list no query and no key comes twice."""
        shares = accumulate((length // self._ranks for length in self._lengths), initial=0)
        tokens = sum(self._lengths) // self._ranks
        found: list[_Apart] = []
        for share, length in zip(shares, self._lengths, strict=False):
            for piece in _pieces(share, length, self._ranks, rank, source, window):
                if not any(pieces.took(piece) for pieces in found):
                    found.append(_Apart(tokens, piece))
        return [pieces.taken for pieces in found]

    def _needed(self, blocks: Sequence[Sequence["_Piece"]]) -> Tensor:
        """Return which keys of the rank that has them are in the blocks, bool [tokens of a rank]."""
        needed = torch.zeros(sum(self._lengths) // self._ranks, dtype=torch.bool)
        for piece in (piece for block in blocks for piece in block):
            needed[piece.keys.start : piece.keys.stop] = True
        return needed


class _Piece(NamedTuple):
    """Queries and keys by their numbers in their ranks' shares, of which each query sees each key."""

    queries: range
    keys: range
    triangle: bool = False
    """Says that each query sees the keys up to its own place only."""
    backwards: bool = False
    """Says that the places of a triangle are counted from its end."""


class _Apart:
    """Pieces of one form in which no query and no key comes twice, and the tokens that are in them: to look
    there takes no longer the more pieces there are."""

    def __init__(self, tokens: int, first: _Piece) -> None:
        self.taken: list[_Piece] = []
        self._triangle = first.triangle
        self._queries, self._keys = bytearray(tokens), bytearray(tokens)
        self.took(first)

    def took(self, piece: _Piece) -> bool:
        """Take a piece, unless it has another form, or a query or a key in common with those here."""
        queries, keys = (slice(run.start, run.stop) for run in (piece.queries, piece.keys))
        if piece.triangle != self._triangle or 1 in self._queries[queries] or 1 in self._keys[keys]:
            return False
        self._queries[queries], self._keys[keys] = b"\1" * len(piece.queries), b"\1" * len(piece.keys)
        self.taken.append(piece)
        return True


def _pieces(
    start: int, length: int, ranks: int, rank: int, source: int, window: int | None
) -> Iterator[_Piece]:
    """Yield what `rank` sees of the keys of `source` in one sequence, whose shares begin at `start`."""
    chunk = length // (2 * ranks)
    both = range(start, start + 2 * chunk)
    halves = both[:chunk], both[chunk:]
    if window is None or window >= length:
        if source == rank:
            yield _Piece(both, both, triangle=True)
        elif source < rank:
            yield _Piece(both, halves[0])
        else:
            yield _Piece(halves[1], both)
        return
    for queries, i in zip(halves, chunks_of_rank(ranks, rank), strict=True):
        for keys, j in zip(halves, chunks_of_rank(ranks, source), strict=True):
            if i == j:
                yield from _own_chunk(queries, keys, window)
            elif i > j:
                yield from _from_shift(queries, keys, (i - j) * chunk + 1 - window)


def _own_chunk(queries: range, keys: range, window: int) -> Iterator[_Piece]:
    for start in range(0, len(queries), window):
        here = slice(start, start + window)
        yield _Piece(queries[here], keys[here], triangle=True)
        if start:
            yield from _from_shift(queries[here], keys[start - window : start], 1)


def _from_shift(queries: range, keys: range, shift: int) -> Iterator[_Piece]:
    """Yield the pieces in which query n sees the keys from n + shift on, both counted from their first."""
    whole, keys = queries[: max(-shift, 0)], keys[max(shift, 0) :]
    queries = queries[len(whole) :]
    if whole and keys:
        yield _Piece(whole, keys)
    edge = min(len(queries), len(keys))
    if edge:
        yield _Piece(queries[:edge], keys[:edge], triangle=True, backwards=True)
    if edge and len(keys) > edge:
        yield _Piece(queries[:edge], keys[edge:])


def _block(pieces: Sequence[_Piece], needed: Tensor) -> Block:
    place = needed.cumsum(0) - 1
    queries, keys = (
        torch.cat([_numbers(run, backwards=piece.backwards) for piece, run in zip(pieces, runs, strict=True)])
        for runs in ([piece.queries for piece in pieces], [piece.keys for piece in pieces])
    )
    sizes = [len(piece.queries) for piece in pieces], [len(piece.keys) for piece in pieces]
    return Block(key_sets(*sizes, causal=pieces[0].triangle), _rows(queries), _rows(place[keys]))


def _numbers(run: range, *, backwards: bool) -> Tensor:
    numbers = torch.arange(run.start, run.stop)
    return numbers.flip(0) if backwards else numbers


def _rows(numbers: Tensor) -> RowIndex:
    if len(numbers) and bool((numbers.diff() == 1).all()):
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return numbers


def _moved(rows: RowIndex, device: torch.device) -> RowIndex:
    return rows if isinstance(rows, slice) else to_device(rows, device)
