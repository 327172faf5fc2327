"""Log-probabilities of given tokens under logits that are never all in memory at once."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from learner.backends.megatron.model.output_layer import _logits_gradient, _statistics, local_columns


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
            project(rows), targets, 1.0 / temperature, group
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
    """log softmax(scale * logits)[label] over a vocabulary split across ranks."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, scale: float, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        """Compute in float32; keep the logits for the backward pass."""
        column, here = local_columns(labels, logits.shape[-1])
        logprobs, entropy, log_total = _statistics(logits, column, here, scale, group)
        ctx.save_for_backward(logits, column, here, log_total)
        ctx.scale = scale
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        """Leave the logits as they are, though on CUDA the gradient is written over what it is made from."""
        logits, column, here, log_total = ctx.saved_tensors
        if logits.is_cuda:
            logits = logits.clone()
        return _logits_gradient(logits, column, here, log_total, grad, ctx.scale), None, None, None
