"""A rank's share of a micro-batch, where ranks share the tokens of each sequence."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from learner.backends.megatron.model.context_attention import chunks_of_rank
from learner.data.packing import OWN_CHOICE, MicroBatch
from learner.data.prefix_tree import PrefixTree
from learner.data.streams import STREAMS
from learner.data.top_tokens import NO_TOKEN


def share_of_rank(batch: MicroBatch, *, ranks: int, rank: int, multiple: int = 1) -> MicroBatch:
    """Cut every sequence zig-zag (learner/backends/megatron/model/context_attention.py).

    Padding that is never trained on comes first. Where sequences share common prefixes, what is cut is all
    computed tokens as one line, and a trained token is with the rank that computes what predicts it.

    Args:
        batch: the whole micro-batch, equal on all ranks.
        ranks: context-parallel ranks.
        rank: which of them this is.
        multiple: what the tokens of each rank must be a multiple of (tensor parallel ranks that share them).

    Returns this rank's tokens; `lengths` and `cu_seqlens` are those of the padded sequences as a whole. With
    common prefixes everything but `trained`, `loss_mask` and `tree` is that of the whole micro-batch.
    """
    if batch.tree is not None:
        return _share_of_tree(batch, batch.tree, ranks, rank, multiple)
    lengths = _padded_lengths(batch.lengths, ranks, multiple)
    if ranks == 1 and lengths == batch.lengths:
        return batch
    starts = torch.tensor([0, *lengths]).cumsum(0)
    position_ids = torch.cat([_positions(length, ranks, rank) for length in lengths])
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths) // ranks)
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
        cu_seqlens=starts.to(torch.int32),
        sequence_of_token=sequence,
        labels=share(batch.labels),
        loss_mask=loss_mask,
        kept=share_if_any(batch.kept, -1),
        teacher_token_ids=share_if_any(batch.teacher_token_ids, NO_TOKEN),
        teacher_logprobs=share_if_any(batch.teacher_logprobs, -math.inf),
        experts=share_if_any(batch.experts, OWN_CHOICE),
        streams={name: share(values, STREAMS[name].fill) for name, values in batch.streams.items()},
        trained=loss_mask.nonzero()[:, 0],
        lengths=lengths,
        denominator=batch.denominator if rank == 0 else 0.0,  # the sum over ranks must count it once
    )


def _share_of_tree(batch: MicroBatch, tree: PrefixTree, ranks: int, rank: int, multiple: int) -> MicroBatch:
    if ranks == 1:
        return replace(batch, tree=tree.padded(multiple))
    whole = tree.padded(math.lcm(2 * ranks, ranks * multiple))
    chunk = len(whole.source) // (2 * ranks)
    own = whole.share(tuple(range(i * chunk, (i + 1) * chunk) for i in chunks_of_rank(ranks, rank)))
    loss_mask = batch.loss_mask & (own.computed >= 0)
    return replace(
        batch,
        tree=own,
        loss_mask=loss_mask,
        trained=loss_mask.nonzero()[:, 0],
        denominator=batch.denominator if rank == 0 else 0.0,  # the sum over ranks must count it once
    )


def _padded_lengths(lengths: tuple[int, ...], ranks: int, multiple: int) -> tuple[int, ...]:
    """Make each length divide into the chunks of all ranks, and their sum into equal shares of `multiple`."""
    chunks = 1 if ranks == 1 else 2 * ranks
    padded = [_round_up(length, chunks) for length in lengths]
    total = sum(padded)
    padded[-1] += _round_up(total, math.lcm(chunks, ranks * multiple)) - total
    return tuple(padded)


def _positions(length: int, ranks: int, rank: int) -> Tensor:
    if ranks == 1:
        return torch.arange(length)
    chunks = torch.arange(length).chunk(2 * ranks)
    return torch.cat([chunks[i] for i in chunks_of_rank(ranks, rank)])


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
