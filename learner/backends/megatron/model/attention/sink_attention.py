"""Attention with sinks: one more logit for each head, which takes its share of the softmax of every query and
gives nothing for it (arXiv:2309.17453, section 3.3, and gpt-oss).

A sink is a set of keys of its own, whose value is zero: the output of the others is scaled by the share of
the softmax that is theirs, so that torch's kernels serve, with windows and on CUDA too."""

from typing import Any

import torch
from torch import Tensor

from learner.backends.megatron.model.attention.key_sets import KeySets, attend, differentiate


def attend_with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    sets: KeySets,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attend within each run: [q, heads, d] and twice [k, groups, d] to [q, heads, d].

    Args:
        query: on CUDA its dtype is one of 16 bits.
        key: as wide as queries.
        value: as wide as queries.
        sinks: [heads], logits.
        sets: runs of queries and keys.
        scale: factor of the scores, not of the sinks.
        window: number of keys that a query sees, the last of them its own; None is all before it."""
    attended: Tensor = _SinkAttention.apply(query, key, value, sinks, sets, scale, window)  # type: ignore[no-untyped-call]
    return attended


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, sets: KeySets, scale: float,
        window: int | None,
    ) -> Tensor:  # fmt: skip
        output, log_sum = attend(query, key, value, sets, scale, window)
        log_total = torch.logaddexp(log_sum, sinks.to(log_sum.dtype))
        output = (output * (log_sum - log_total).exp()[..., None]).to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, output, log_total)
        ctx.sets, ctx.scale, ctx.window = sets, scale, window
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients; with p the share of a sink, that of its logit is -p * (grad . output)."""
        query, key, value, sinks, output, log_total = ctx.saved_tensors
        grad = grad.contiguous()
        of_others = differentiate(grad, query, key, value, output, log_total, ctx.sets, ctx.scale, ctx.window)
        share = (sinks.to(log_total.dtype) - log_total).exp()
        along = (grad.to(log_total.dtype) * output).sum(-1)
        return *of_others, -(share * along).sum(0).to(sinks.dtype), None, None, None
