"""Attention where sequences share their first tokens: each segment of a tree sees itself and what led to it.

Segments lie in depth-first order, so those that follow a segment come right behind it. The keys that a query
sees are its own segment's, causally, and those of each segment before it on its path, all of them. The
former is one call of a kernel for all segments; the latter is one for each level of segments that others
follow, in which the queries of everything below such a segment are one run: its keys and values are read
once, and neither copied for each sequence nor expanded.

Ranks that share the tokens (context parallelism) hold two runs each of the line in which segments lie end to
end, and gather the keys of all. A piece of a segment sees itself causally, and then what of its segment comes
before it, which is one more set of keys.

What each set of keys contributes is put together by the logarithms of the softmax's sums
(learner/backends/megatron/model/attention/key_sets.py)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from learner.backends.megatron.model.attention.context_attention import gathered_line
from learner.backends.megatron.model.attention.key_sets import (
    KeySets,
    attend,
    common,
    differentiate,
    key_sets,
)
from learner.host_memory.copies import to_device


@dataclass(frozen=True, slots=True)
class TreeLevel:
    """Segments of one depth that others follow, as keys of all that is below them."""

    sets: KeySets
    queries: Tensor
    """int64, the tokens that are queries, run by run."""
    keys: Tensor
    """int64, the tokens that are keys, run by run."""

    def to(self, device: torch.device) -> "TreeLevel":
        return TreeLevel(self.sets.to(device), to_device(self.queries, device), to_device(self.keys, device))

    def of(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pick this level's queries, keys and values."""
        return query[self.queries], key[self.keys], value[self.keys]


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """The sets of keys that queries see: their own segment's, and those of each level above."""

    own: KeySets
    above: tuple[TreeLevel, ...]
    line: Tensor | None = None
    """int64 [U], where each key of the line of segments is among those gathered from all ranks; None where
    this rank has all of them."""
    own_keys: Tensor | None = None
    """int64, where the tokens of this rank are in that line."""

    def to(self, device: torch.device) -> "TreeLayout":
        return TreeLayout(
            self.own.to(device),
            tuple(level.to(device) for level in self.above),
            None if self.line is None else to_device(self.line, device),
            None if self.own_keys is None else to_device(self.own_keys, device),
        )


def tree_layout(
    lengths: Sequence[int], parents: Sequence[int], held: Sequence[range] = (), *, ranks: int = 1
) -> TreeLayout:
    """Compute what each token of this rank sees.

    Args:
        lengths: of the segments, in depth-first order.
        parents: the segment before each; -1 for a root.
        held: tokens of the line of segments that this rank has; all of them where it is empty.
        ranks: context-parallel ranks that share the line."""
    starts = [0, *accumulate(lengths)]
    runs = held or [range(starts[-1])]
    segments = [range(*pair) for pair in pairwise(starts)]
    pieces = [(piece, segment) for run in runs for segment in segments if (piece := common(run, segment))]
    earlier = [(piece, range(segment.start, piece.start)) for piece, segment in pieces]
    sees = [[(queries, keys) for queries, keys in earlier if keys], *_levels(starts, parents)]
    levels = [[(own, keys) for queries, keys in each for own in _numbers(queries, runs)] for each in sees]
    sizes = [len(piece) for piece, _ in pieces]
    return TreeLayout(
        own=key_sets(sizes, sizes, causal=True),
        above=tuple(_level(each) for each in levels if each),
        line=gathered_line(starts[-1], ranks) if held else None,
        own_keys=torch.cat([torch.arange(run.start, run.stop) for run in held]) if held else None,
    )


Run = tuple[range, range]
"""Queries and keys, by their numbers in the line of segments."""


def _numbers(tokens: range, runs: Sequence[range]) -> list[range]:
    """Return the tokens that are in the runs, by their numbers when the runs lie end to end."""
    firsts = accumulate((len(run) for run in runs), initial=0)
    found = ((common(run, tokens), first - run.start) for run, first in zip(runs, firsts, strict=False))
    return [range(part.start + shift, part.stop + shift) for part, shift in found if part]


def _levels(starts: Sequence[int], parents: Sequence[int]) -> list[list[Run]]:
    """Return the runs of each depth: all tokens below a segment that others follow, and its own as keys."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    levels: dict[int, list[Run]] = {}
    for segment, depth in enumerate(depths):
        begin = end = segment + 1
        while end < len(depths) and depths[end] > depth:
            end += 1
        if end > begin:
            queries, keys = range(starts[begin], starts[end]), range(starts[segment], starts[begin])
            levels.setdefault(depth, []).append((queries, keys))
    return [levels[depth] for depth in sorted(levels)]


def _level(runs: Sequence[Run]) -> TreeLevel:
    queries, keys = zip(*runs, strict=True)
    return TreeLevel(
        key_sets([len(run) for run in queries], [len(run) for run in keys], causal=False),
        torch.cat([torch.arange(run.start, run.stop) for run in queries]),
        torch.cat([torch.arange(run.start, run.stop) for run in keys]),
    )


def attend_along_paths(
    query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, *, scale: float
) -> Tensor:
    """Attend from each token to its path: [N, heads, d] and twice [U, groups, d] to [N, heads, d].

    Keys and values are those of the whole line of segments, queries those of this rank. `scale` is a factor
    of the scores. On CUDA the dtype is one of 16 bits."""
    attended: Tensor = _TreeAttention.apply(query, key, value, layout, scale)  # type: ignore[no-untyped-call]
    return attended


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, scale: float
    ) -> Tensor:
        own_key, own_value = _own(layout, key, value)
        output, log_total = attend(query, own_key, own_value, layout.own, scale)
        if layout.above:
            output = output.to(log_total.dtype)
        for level in layout.above:
            found, found_log_total = attend(*level.of(query, key, value), level.sets, scale)
            before = log_total[level.queries]
            total = torch.logaddexp(before, found_log_total)
            output[level.queries] = output[level.queries] * (before - total).exp()[..., None] + (
                found * (found_log_total - total).exp()[..., None]
            )
            log_total[level.queries] = total
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, log_total)
        ctx.layout, ctx.scale = layout, scale
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, log_total = ctx.saved_tensors
        layout: TreeLayout = ctx.layout
        grad = grad.contiguous()
        own_key, own_value = _own(layout, key, value)
        of_query, of_key, of_value = differentiate(
            grad, query, own_key, own_value, output, log_total, layout.own, ctx.scale
        )
        of_key, of_value = _of_line(layout, of_key, key), _of_line(layout, of_value, value)
        for level in layout.above:
            found = differentiate(
                grad[level.queries],
                *level.of(query, key, value),
                output[level.queries],
                log_total[level.queries],
                level.sets,
                ctx.scale,
            )
            of_query.index_add_(0, level.queries, found[0])
            of_key.index_add_(0, level.keys, found[1])
            of_value.index_add_(0, level.keys, found[2])
        return of_query, of_key, of_value, None, None


def _own(layout: TreeLayout, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    own = layout.own_keys
    return (key, value) if own is None else (key[own], value[own])


def _of_line(layout: TreeLayout, own: Tensor, line: Tensor) -> Tensor:
    """Return gradients of this rank's tokens as those of the whole line of keys."""
    return own if layout.own_keys is None else torch.zeros_like(line).index_add_(0, layout.own_keys, own)
