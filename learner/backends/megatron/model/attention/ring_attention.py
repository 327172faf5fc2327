"""Attention in which the keys and values of other context-parallel ranks pass by, instead of being gathered.

A rank computes with the keys and values of one rank while those of the next are on their way, so that it
holds those of two others at most (ring attention, arXiv:2310.01889). They come from the rank that has them,
not by way of the others: so a rank is sent what it sees and no more
(learner/backends/megatron/model/attention/ring_layout.py). Backwards they pass by once more, and their
gradients are sent to the rank that has them while the next are computed."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from learner.backends.megatron.model.attention.key_sets import attend, differentiate
from learner.backends.megatron.model.attention.ring_layout import Block, RingStep
from learner.backends.shared.packed_attention import of_one_width


def attend_around(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    steps: Sequence[RingStep],
    group: dist.ProcessGroup,
    *,
    scale: float,
) -> Tensor:
    """Attend causally within each sequence, from this rank's queries to the keys of all ranks.

    Every rank of the group calls this. On CUDA the dtype is one of 16 bits.

    Args:
        query: [T, heads, d] of this rank.
        key: [T, groups, d] of this rank.
        value: [T, groups, v] of this rank.

    Returns [T, heads, v]."""
    attended: Tensor = _RingAttention.apply(query, key, value, steps, group, scale)  # type: ignore[no-untyped-call]
    return attended


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, steps: Sequence[RingStep],
        group: dist.ProcessGroup, scale: float,
    ) -> Tensor:  # fmt: skip
        dtype = torch.promote_types(query.dtype, torch.float32)
        output = query.new_zeros(*query.shape[:2], value.shape[-1], dtype=dtype)
        log_total = query.new_full(query.shape[:2], -torch.inf, dtype=dtype)
        for step, held in _passing(steps, key, value, group):
            for block in step.blocks:
                _add_block(output, log_total, query, held, block, scale)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, log_total)
        ctx.steps, ctx.group, ctx.scale = steps, group, scale
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Send each rank the gradients of its keys and values, and add up what comes for this one's."""
        query, key, value, output, log_total = ctx.saved_tensors
        dtype = log_total.dtype
        of_query, *of_own = (torch.zeros_like(x, dtype=dtype) for x in (query, key, value))
        returning: list[tuple[RingStep, _Exchange]] = []
        for step, held in _passing(ctx.steps, key, value, ctx.group):
            own = step.source == step.target == ctx.group.rank()
            found = of_own if own else [torch.zeros_like(x, dtype=dtype) for x in held]
            for block in step.blocks:
                whole = grad, output, log_total
                _add_gradients((of_query, *found), query, held, whole, block, ctx.scale)
            _add_returned(returning, of_own)
            if not own:
                parts = [part.to(query.dtype) for part in found]
                returning.append((step, _returned(step, parts, key, value, ctx.group)))
        _add_returned(returning, of_own)
        return *(total.to(query.dtype) for total in (of_query, *of_own)), None, None, None


def _passing(
    steps: Sequence[RingStep], key: Tensor, value: Tensor, group: dist.ProcessGroup
) -> Iterator[tuple[RingStep, list[Tensor]]]:
    """Yield each step with its keys and values, while those of the next one are on their way. The list of
    these is emptied before those behind the next ones are received."""
    held = [key, value]
    for step, following in zip_longest(steps, steps[1:]):
        coming = None
        if following is not None:
            leaving = [x[following.sent] for x in (key, value)]
            arriving = [x.new_empty(following.arriving, *x.shape[1:]) for x in (key, value)]
            coming = _Exchange(leaving, following.target, arriving, following.source, group)
        yield step, held
        held.clear()
        if coming is not None:
            held = coming.arrived()


def _returned(
    step: RingStep, parts: Sequence[Tensor], key: Tensor, value: Tensor, group: dist.ProcessGroup
) -> "_Exchange":
    arriving = [x.new_empty(step.leaving, *x.shape[1:]) for x in (key, value)]
    return _Exchange(parts, step.source, arriving, step.target, group)


def _add_returned(returning: "list[tuple[RingStep, _Exchange]]", of_own: Sequence[Tensor]) -> None:
    while returning:
        step, exchange = returning.pop()
        for total, part in zip(of_own, exchange.arrived(), strict=True):
            total[step.sent] += part


class _Exchange:
    """Tensors on their way to one rank, and others from another, of which each may be without rows.

    The ranks of a group start the same exchanges in the same order, since nothing but the order tells
    messages apart."""

    def __init__(
        self, leaving: Sequence[Tensor], target: int, arriving: list[Tensor], source: int,
        group: dist.ProcessGroup,
    ) -> None:  # fmt: skip
        self._leaving = [x.contiguous() for x in leaving]  # kept until all are sent
        self._arriving = arriving
        operations = [
            dist.P2POp(operation, x, group=group, group_peer=peer)
            for operation, tensors, peer in (
                (dist.isend, self._leaving, target),
                (dist.irecv, arriving, source),
            )
            for x in tensors
            if len(x)
        ]
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def arrived(self) -> list[Tensor]:
        """Return what has come; on CUDA the host does not wait. The group's timeout bounds the wait."""
        for work in self._works:
            work.wait()
        self._leaving.clear()
        return self._arriving


def _add_block(
    output: Tensor, log_total: Tensor, query: Tensor, held: Sequence[Tensor], block: Block, scale: float
) -> None:
    """Add what `query`, [T, heads, d], finds in one block to `output`, [T, heads, v], and to `log_total`,
    [T, heads], the logarithms of their softmax's sums."""
    rows, width = block.queries, output.shape[-1]
    query, key, value = of_one_width(query[rows], *(x[block.keys] for x in held))
    found, found_log_total = attend(query, key, value, block.sets, scale)
    before = log_total[rows]
    total = torch.logaddexp(before, found_log_total)
    output[rows] = output[rows] * (before - total).exp()[..., None] + (
        found[..., :width] * (found_log_total - total).exp()[..., None]
    )
    log_total[rows] = total


def _add_gradients(
    totals: Sequence[Tensor], query: Tensor, held: Sequence[Tensor],
    whole: tuple[Tensor, Tensor, Tensor], block: Block, scale: float,
) -> None:  # fmt: skip
    """Add the gradients through one block to `totals`: those of the query, and of the keys and values of the
    step. `whole` is the gradient of the output, the output and the logarithms of its softmax's sums, over all
    blocks."""
    grad, output, log_total = (x[block.queries] for x in whole)
    query, key, value, grad, output = of_one_width(
        query[block.queries], *(x[block.keys] for x in held), grad, output
    )
    found = differentiate(grad.contiguous(), query, key, value, output, log_total, block.sets, scale)
    for total, rows, part in zip(totals, (block.queries, block.keys, block.keys), found, strict=True):
        total[rows] += part[..., : total.shape[-1]]
