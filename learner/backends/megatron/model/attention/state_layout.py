"""Lays out sequences for layers that take a state from token to token, whose ranks share heads instead of
tokens.

A state goes through a sequence from its first token to its last, so that ranks which share the tokens
(context parallelism) would wait for one another. In such a layer they share the heads: each sends every other
rank what its tokens have of that rank's heads, and then has all tokens of its own heads (DeepSpeed-Ulysses,
arXiv:2309.14509, section 3). What the heads found goes back the same way. A sequence that one rank has whole
stays there, with all heads."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from learner.backends.megatron.core.megatron_core import tensor_parallel
from learner.backends.megatron.model.attention.context_attention import ContextRanks, gathered_places
from learner.backends.shared.packed_attention import LengthBucket, bucket_by_length
from learner.data.packing import MicroBatch
from learner.host_memory.copies import to_device


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Sequences of a micro-batch, which either this rank has whole or all context ranks have a share of."""

    tokens: int
    """Number of this rank's tokens that are of these sequences; they lie end to end."""
    is_cut: bool
    """Says whether context ranks share the tokens."""
    buckets: tuple[LengthBucket, ...]
    """The sequences by length, longest first."""
    slots: Tensor | None
    """int64, place in the padded buckets laid end to end of each token, of those that are cut of the tokens
    of all ranks laid end to end; `None` means the same place."""


def state_layouts(batch: MicroBatch, context: ContextRanks, device: torch.device) -> tuple[StateLayout, ...]:
    """Lay out the sequences of a rank's share, those first that are cut; there are some of either kind."""
    cut, whole = batch.cut, batch.whole
    if cut is None:
        cut, whole = (batch.lengths, ()) if context.ranks > 1 else ((), batch.lengths)
    kinds = (cut, context.ranks), (whole, 1)
    return tuple(_layout(lengths, ranks, device) for lengths, ranks in kinds if lengths)


def buckets_of(
    lengths: Sequence[int], device: torch.device
) -> tuple[tuple[LengthBucket, ...], Tensor | None]:
    """Return buckets of sequences that lie end to end, and the slots of their tokens."""
    if len(set(lengths)) == 1:
        return (LengthBucket(len(lengths), lengths[0]),), None
    buckets, slots = bucket_by_length(lengths)
    return buckets, to_device(slots, device)


def _layout(lengths: Sequence[int], ranks: int, device: torch.device) -> StateLayout:
    if ranks == 1:
        return StateLayout(sum(lengths), False, *buckets_of(lengths, device))
    buckets, slots = bucket_by_length(lengths)
    of_places = torch.empty_like(slots).index_copy(0, torch.cat(gathered_places(lengths, ranks)), slots)
    return StateLayout(sum(lengths) // ranks, True, buckets, to_device(of_places, device))


def to_heads(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Exchange tokens for heads: each [T, heads, n] becomes [all T, heads / ranks, n], this rank's heads of
    the tokens of all ranks, laid end to end. Every rank of the group calls this with as many tokens."""
    ranks = group.size()
    by_rank = torch.cat([x.reshape(len(x), ranks, -1, x.shape[-1]).transpose(0, 1) for x in tensors], -1)
    found: Tensor = tensor_parallel.all_to_all(group, by_rank)
    return list(torch.split(found.flatten(0, 1), [x.shape[-1] for x in tensors], -1))


def to_tokens(heads: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return [T, heads, n] of this rank's tokens for [all T, heads / ranks, n], as `to_heads` makes them."""
    by_rank = heads.reshape(group.size(), -1, *heads.shape[1:])
    found: Tensor = tensor_parallel.all_to_all(group, by_rank)
    return found.transpose(0, 1).flatten(1, 2)
