"""Log-probabilities of given tokens under logits that are never all in memory at once."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from learner.head import local_columns


def label_logprobs(
    hidden: Tensor,
    project: Callable[[Tensor], Tensor],
    labels: Tensor,
    *,
    temperature: float,
    group: dist.ProcessGroup | None = None,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Return float32 log-probabilities [N] in nats of `labels`, and the entropy [N] without gradient.

    Args:
        hidden: [N, H], inputs of the output layer.
        project: the output layer, [c, H] to the logits [c, v] of this rank's part of the vocabulary.
        labels: int64 [N], counted from the first of this rank's part.
        temperature: divides the logits, as it did when the tokens were sampled.
        group: tensor-parallel ranks that share the vocabulary; `None` is one rank.
        chunk_size: rows of logits alive at a time; more rows are recomputed in the backward pass.
    """

    def one_chunk(rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, entropy = _LabelLogprobs.apply(  # type: ignore[no-untyped-call]
            project(rows), targets, temperature, group
        )
        return logprobs, entropy

    if len(hidden) <= chunk_size:
        return one_chunk(hidden, labels)
    chunks = [
        checkpoint(one_chunk, rows, targets, use_reentrant=False)
        for rows, targets in zip(
            torch.split(hidden, chunk_size), torch.split(labels, chunk_size), strict=True
        )
    ]
    return torch.cat([logprobs for logprobs, _ in chunks]), torch.cat([entropy for _, entropy in chunks])


class _LabelLogprobs(torch.autograd.Function):
    """log softmax(logits / temperature)[label] over a vocabulary split across ranks."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, temperature: float, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        """Compute in float32; keep the softmax for the backward pass."""
        scaled = logits.float() / temperature
        largest = _reduce(scaled.amax(dim=-1, keepdim=True), dist.ReduceOp.MAX, group)
        shifted = scaled.sub_(largest)
        column, here = local_columns(labels, logits.shape[-1])
        label_logit = torch.where(here, shifted.gather(-1, column), 0.0)
        softmax = shifted.exp()
        sums = torch.cat(
            (label_logit, softmax.sum(-1, keepdim=True), (softmax * shifted).sum(-1, keepdim=True)), -1
        )
        label_logit, total, weighted = _reduce(sums, dist.ReduceOp.SUM, group).unbind(-1)
        log_total = total.log()
        entropy = log_total - weighted / total
        softmax.div_(total[:, None])
        ctx.save_for_backward(softmax, column, here)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.mark_non_differentiable(entropy)
        return label_logit - log_total, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        """d logprob / d logits = (onehot - softmax) / temperature."""
        softmax, column, here = ctx.saved_tensors
        grad = (grad / ctx.temperature)[:, None]
        grad_logits = softmax * -grad
        grad_logits.scatter_add_(-1, column, torch.where(here, grad, 0.0))
        return grad_logits.to(ctx.dtype), None, None, None


def _reduce(values: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(values, op=op, group=group)
    return values
