"""The output layer behind a head for the token after the next: its loss, and how often the head is right."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from learner.backends.output.output_layer import (
    RowStatistics,
    local_columns,
    softmax_sums,
    sums_over_ranks,
    whole_gradient,
)


class HeadLoss(NamedTuple):
    """The loss of a head over its N tokens."""

    gradient: Tensor
    """[N, H], that of the summed loss in what the head returns; partial under tensor parallelism."""
    loss: Tensor
    """float32 [], sum of the cross entropies in nats, times the weights."""
    correct: Tensor
    """int64 [], number of tokens that are the likeliest."""


@torch.no_grad()
def head_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, counted: Tensor, loss_weights: Tensor, *,
    group: dist.ProcessGroup | None = None, chunk_size: int,
) -> HeadLoss:  # fmt: skip
    """Return loss and gradient at once, since the output layer is the policy's and has no gradient here.

    Args:
        hidden: [N, H], inputs of the output layer.
        weight: [v, H], this rank's part of it.
        labels: int64 [N], counted from the first row of this rank's part.
        counted: bool [N], which rows count.
        loss_weights: float32 [N], what the losses of rows are multiplied by.
        group: tensor-parallel ranks that share the vocabulary; `None` is one rank.
        chunk_size: rows of logits alive at a time."""
    gradient = torch.empty_like(hidden)
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
    for start in range(0, len(hidden), chunk_size):
        rows = slice(start, min(start + chunk_size, len(hidden)))
        logits = hidden[rows] @ weight.t()
        column, here = local_columns(labels[rows], logits.shape[-1])
        scale = torch.ones(len(logits), dtype=torch.float32, device=logits.device)
        label = torch.where(here, logits.gather(-1, column).float(), 0.0)[:, 0]
        largest, total, weighted = softmax_sums(logits, scale)
        largest, label, total, weighted = sums_over_ranks(largest, label, total, weighted, group)
        log_total = total.log()
        found = RowStatistics(label - largest - log_total, log_total - weighted / total, largest + log_total)
        slope = torch.where(counted[rows], -loss_weights[rows], 0.0)
        loss += (slope * torch.where(counted[rows], found.logprobs, 0.0)).sum()
        correct += (counted[rows] & (label >= largest)).sum()
        torch.mm(whole_gradient(logits, column, here, found, slope, None, scale), weight, out=gradient[rows])
    return HeadLoss(gradient, loss, correct)
