"""A rank's share of a micro-batch, where ranks share the tokens of each sequence."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from learner.backends.megatron.model.attention.context_attention import chunks_of_rank
from learner.data.packing import OWN_CHOICE, MicroBatch
from learner.data.prefix_tree import PrefixTree
from learner.data.streams import STREAMS
from learner.data.top_tokens import NO_TOKEN

SLACK = 1.1
"""Most tokens of whole sequences that a context rank gets, in units of the mean over these ranks."""


def share_of_rank(
    batch: MicroBatch, *, ranks: int, rank: int, multiple: int = 1, min_tokens: int = 0
) -> MicroBatch:
    """Cut every sequence zig-zag (learner/backends/megatron/model/attention/context_attention.py), short ones
    excepted.

    Padding that is never trained on comes first. Where sequences share common prefixes, what is cut is all
    computed tokens as one line, and a trained token is with the rank that computes what predicts it.

    Args:
        batch: the whole micro-batch, equal on all ranks.
        ranks: context-parallel ranks.
        rank: which of them this is.
        multiple: what the tokens of each rank must be a multiple of (tensor parallel ranks that share them).
        min_tokens: sequences of fewer tokens are with one rank each, as far as that burdens all alike.

    Returns this rank's tokens; `lengths` and `cu_seqlens` are those of the padded sequences as a whole, where
    not all of them are cut `cu_seqlens` those of the ones that this rank has whole. With common prefixes
    everything but `trained`, `loss_mask` and `tree` is that of the whole micro-batch."""
    if batch.tree is not None:
        return _share_of_tree(batch, batch.tree, ranks, rank, multiple)
    cut, whole_of_ranks = _divided(batch.lengths, ranks, min_tokens)
    whole = whole_of_ranks[rank]
    padded = _padded_lengths([batch.lengths[i] for i in cut], ranks, multiple)
    if len(cut) == len(batch.lengths):
        if ranks == 1 and padded == batch.lengths:
            return batch
        runs = _cut_runs(cut, padded, ranks, rank)
        return _share_of_runs(batch, runs, rank, lengths=padded, cu_seqlens=_starts(padded))
    own = _padded_lengths([batch.lengths[i] for i in whole], 1, multiple)
    runs = _cut_runs(cut, padded, ranks, rank) + _cut_runs(whole, own, 1, 0)
    if not runs:  # nothing is left for this rank: it computes padding
        own = (multiple,)
        runs = [(0, torch.arange(multiple) + batch.lengths[0])]
    return _share_of_runs(batch, runs, rank, cut=padded, whole=own, cu_seqlens=_starts(own))


def _divided(lengths: Sequence[int], ranks: int, min_tokens: int) -> tuple[list[int], list[list[int]]]:
    """Return the numbers of the sequences that are cut over the ranks, and of those that each has whole. It
    follows from the lengths alone, so that all ranks come to the same."""
    short = sorted((i for i, length in enumerate(lengths) if length < min_tokens), key=lambda i: -lengths[i])
    most = SLACK * sum(lengths[i] for i in short) / ranks
    whole: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for i in short if ranks > 1 else ():
        rank = loads.index(min(loads))
        if loads[rank] + lengths[i] <= most:
            whole[rank].append(i)
            loads[rank] += lengths[i]
    kept = {i for of_rank in whole for i in of_rank}
    return [i for i in range(len(lengths)) if i not in kept], whole


_Runs = list[tuple[int, Tensor]]
"""Numbers of sequences, each with positions in it."""


def _cut_runs(sequences: Sequence[int], lengths: Sequence[int], ranks: int, rank: int) -> _Runs:
    return [(i, _positions(length, ranks, rank)) for i, length in zip(sequences, lengths, strict=True)]


def _starts(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def _share_of_runs(batch: MicroBatch, runs: _Runs, rank: int, **lengths: Any) -> MicroBatch:
    """Pick the tokens of these runs; what lies behind the end of a sequence is padding."""
    position_ids = torch.cat([positions for _, positions in runs])
    sequence = torch.cat([torch.full_like(positions, i) for i, positions in runs])
    real = position_ids < torch.tensor(batch.lengths)[sequence]
    source = torch.where(real, batch.cu_seqlens[sequence] + position_ids, 0)

    def share(values: Tensor, fill: float = 0) -> Tensor:
        mine = real.view(-1, *[1] * (values.ndim - 1))
        return torch.where(mine, values[source], torch.tensor(fill, dtype=values.dtype))

    def share_if_any(values: Tensor | None, fill: float) -> Tensor | None:
        return None if values is None else share(values, fill)

    loss_mask = share(batch.loss_mask)
    return replace(
        batch,
        tokens=share(batch.tokens),
        position_ids=position_ids,
        sequence_of_token=sequence,
        labels=share(batch.labels),
        loss_mask=loss_mask,
        kept=share_if_any(batch.kept, -1),
        teacher_token_ids=share_if_any(batch.teacher_token_ids, NO_TOKEN),
        teacher_logprobs=share_if_any(batch.teacher_logprobs, -math.inf),
        experts=share_if_any(batch.experts, OWN_CHOICE),
        streams={name: share(values, STREAMS[name].fill) for name, values in batch.streams.items()},
        trained=loss_mask.nonzero()[:, 0],
        **_counts(batch, rank),
        **lengths,
    )


def _share_of_tree(batch: MicroBatch, tree: PrefixTree, ranks: int, rank: int, multiple: int) -> MicroBatch:
    if ranks == 1:
        return replace(batch, tree=tree.padded(multiple))
    whole = tree.padded(math.lcm(2 * ranks, ranks * multiple))
    chunk = len(whole.source) // (2 * ranks)
    own = whole.share(tuple(range(i * chunk, (i + 1) * chunk) for i in chunks_of_rank(ranks, rank)))
    loss_mask = batch.loss_mask & (own.computed >= 0)
    return replace(
        batch, tree=own, loss_mask=loss_mask, trained=loss_mask.nonzero()[:, 0], **_counts(batch, rank)
    )


def _counts(batch: MicroBatch, rank: int) -> dict[str, Any]:
    """Give the counts of the whole micro-batch to the first rank: the sum over ranks must have them once."""
    return {
        "denominator": batch.denominator if rank == 0 else 0.0,
        "left_out_tokens": batch.left_out_tokens if rank == 0 else 0,
    }


def _padded_lengths(lengths: Sequence[int], ranks: int, multiple: int) -> tuple[int, ...]:
    """Make each length divide into the chunks of all ranks, and their sum into equal shares of `multiple`."""
    chunks = 1 if ranks == 1 else 2 * ranks
    padded = [_round_up(length, chunks) for length in lengths]
    total = sum(padded)
    if padded:
        padded[-1] += _round_up(total, math.lcm(chunks, ranks * multiple)) - total
    return tuple(padded)


def _positions(length: int, ranks: int, rank: int) -> Tensor:
    if ranks == 1:
        return torch.arange(length)
    chunks = torch.arange(length).chunk(2 * ranks)
    return torch.cat([chunks[i] for i in chunks_of_rank(ranks, rank)])


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
