"""Attention from this rank's share of the tokens to the keys and values of all context-parallel ranks.

Each sequence is cut into 2 * ranks chunks of equal length, of which rank r holds the r-th and the r-th from
the end: every rank then has the same work under a causal mask (zig-zag, as in Megatron). Queries stay; keys
and values are gathered, so a rank holds those of one layer's whole pack at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from learner.backends.megatron.core.megatron_core import tensor_parallel
from learner.backends.megatron.model.attention.key_sets import KeySets, key_sets
from learner.backends.megatron.model.attention.sink_attention import attend_with_sinks
from learner.backends.shared.packed_attention import causal_varlen_attention, seen_keys
from learner.host_memory.copies import to_device


@dataclass(frozen=True, slots=True)
class ContextRanks:
    """The ranks that share the tokens of each sequence."""

    ranks: int = 1
    rank: int = 0
    """Number of this rank among them."""
    ring: bool = False
    """Says that keys and values pass by (learner/backends/megatron/model/attention/ring_attention.py)."""


ALONE = ContextRanks()
"""A rank that has whole sequences."""


@dataclass(frozen=True, kw_only=True)
class ContextLayout:
    """Runs of consecutive queries of this rank, two a sequence, each with the keys up to its end."""

    runs: tuple[tuple[int, int, int], ...]
    """(number of runs, queries of each, keys of each), runs of one size together."""
    queries: Tensor | None
    """int64 [T], the queries in the order of `runs`; `None` if they are in that order already."""
    back: Tensor | None
    """int64 [T], the inverse of `queries`."""
    keys: Tensor
    """int64, indices of the keys of every run in turn, in the ranks' gathered keys."""
    sets: KeySets
    """The runs, in the order of `queries` and `keys`."""
    by_length: bool
    """Says whether runs of one size are attended to together, since no kernel takes any lengths here."""

    def to(self, device: torch.device) -> "ContextLayout":
        moved = {
            name: to_device(value, device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return ContextLayout(**{**vars(self), **moved, "sets": self.sets.to(device)})


@dataclass(frozen=True)
class _Run:
    first_query: int
    queries: int
    keys: Tensor


def chunks_of_rank(ranks: int, rank: int) -> tuple[int, int]:
    """Return which two of the 2 * ranks chunks of every sequence `rank` holds."""
    return rank, 2 * ranks - 1 - rank


def context_layout(lengths: Sequence[int], *, ranks: int, rank: int, by_length: bool) -> ContextLayout:
    """Compute what `rank` attends to, for sequences of `lengths`, each a multiple of 2 * ranks."""
    runs = list(_runs(lengths, ranks, rank))
    order = range(len(runs))
    if by_length:
        order = sorted(order, key=lambda i: (runs[i].queries, len(runs[i].keys)))  # type: ignore[assignment]
    sizes = [(runs[i].queries, len(runs[i].keys)) for i in order]
    queries = torch.cat([torch.arange(runs[i].queries) + runs[i].first_query for i in order])
    return ContextLayout(
        runs=tuple((sizes.count(size), *size) for size in dict.fromkeys(sizes)),
        queries=queries if by_length else None,
        back=queries.argsort() if by_length else None,
        keys=torch.cat([runs[i].keys for i in order]),
        sets=key_sets([queries for queries, _ in sizes], [keys for _, keys in sizes], causal=True),
        by_length=by_length,
    )


def gathered(key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the keys and values [T, groups, d] of all ranks, laid end to end; with gradient."""
    both = torch.cat((key, value), -1)
    whole = tensor_parallel.gather_from_sequence_parallel_region(both, group=group)
    width = key.shape[-1]
    return whole[..., :width], whole[..., width:]


def gathered_line(tokens: int, ranks: int) -> Tensor:
    """Return where each token of a line that is cut as one sequence is, when ranks are laid end to end.

    Args:
        tokens: of the line, a multiple of 2 * ranks."""
    [places] = gathered_places([tokens], ranks)
    return places


def gathered_places(lengths: Sequence[int], ranks: int) -> list[Tensor]:
    """Return where the tokens of each sequence are when the tokens of all ranks are laid end to end.

    Args:
        lengths: of the sequences, each a multiple of 2 * ranks."""
    tokens_per_rank = sum(lengths) // ranks
    first_tokens = accumulate((length // ranks for length in lengths), initial=0)
    return [
        torch.cat(
            [
                _gathered_chunk(i, ranks, length // (2 * ranks), tokens_per_rank, first)
                for i in range(2 * ranks)
            ]
        )
        for length, first in zip(lengths, first_tokens, strict=False)
    ]


def attend_to_gathered(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: ContextLayout,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend causally within each sequence, from this rank's queries to the keys of all ranks.

    Args:
        query: [T, heads, d] of this rank.
        key: [all T, groups, d], as `gathered` lays them end to end; value likewise.
        layout: made by `context_layout` for the same micro-batch.
        window: number of tokens that a query sees, its own the last of them; None is all before it.
        sinks: [heads], logits (learner/backends/megatron/model/attention/sink_attention.py).

    Returns [T, heads, d]."""
    key, value = (x.index_select(0, layout.keys) for x in (key, value))
    if sinks is not None:
        ordered = query if layout.queries is None else query.index_select(0, layout.queries)
        found = attend_with_sinks(ordered, key, value, sinks, layout.sets, scale=scale, window=window)
        return found if layout.back is None else found.index_select(0, layout.back)
    if layout.by_length:
        return _attend_by_length(query, key, value, layout, scale, window)
    return causal_varlen_attention(
        query,
        key,
        value,
        layout.sets.cu_queries,
        layout.sets.cu_keys,
        max(layout.sets.query_sizes),
        max(layout.sets.key_sizes),
        scale=scale,
        window=window,
    )


def _attend_by_length(
    query: Tensor, key: Tensor, value: Tensor, layout: ContextLayout, scale: float, window: int | None
) -> Tensor:
    if layout.queries is None or layout.back is None:
        raise ValueError("this layout is for the kernel that takes any lengths")
    query = query.index_select(0, layout.queries)
    attended = []
    for queries, keys, values, (runs, n, m) in zip(
        torch.split(query, [runs * n for runs, n, _ in layout.runs]),
        torch.split(key, [runs * m for runs, _, m in layout.runs]),
        torch.split(value, [runs * m for runs, _, m in layout.runs]),
        layout.runs,
        strict=True,
    ):
        q, k, v = (x.view(runs, -1, *x.shape[1:]).transpose(1, 2) for x in (queries, keys, values))
        seen = seen_keys(n, m, window, query.device)
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
        attended.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(attended).index_select(0, layout.back)


def _runs(lengths: Sequence[int], ranks: int, rank: int) -> "list[_Run]":
    runs, first_query = [], 0
    for length, places in zip(lengths, gathered_places(lengths, ranks), strict=True):
        chunk = length // (2 * ranks)
        for i in chunks_of_rank(ranks, rank):
            runs.append(_Run(first_query, chunk, places[: (i + 1) * chunk]))
            first_query += chunk
    return runs


def _gathered_chunk(i: int, ranks: int, chunk: int, tokens_per_rank: int, first_of_sequence: int) -> Tensor:
    """Return the place of chunk i of a sequence when every rank's tokens are laid end to end."""
    holder = min(i, 2 * ranks - 1 - i)
    second = i >= ranks
    start = holder * tokens_per_rank + first_of_sequence + second * chunk
    return torch.arange(start, start + chunk)
