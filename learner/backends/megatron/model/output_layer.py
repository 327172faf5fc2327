"""The output layer and a token-level loss in one, so that [T, V] never exists, nor is computed twice.

A loss that is a sum over tokens has its gradient at each token as soon as that token's log-probability is
known. So the forward pass takes the trained tokens chunk by chunk: logits, log-probabilities, loss, gradient
of the logits, and from it those of the hidden states and the weight; the logits are forgotten before the next
chunk. The backward pass only hands out what is there (as liger-kernel does for cross-entropy,
arXiv:2410.10989, section 3.2).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from learner.backends.megatron.multi_tensor import add_product

if torch.cuda.is_available():  # triton comes with torch for CUDA only
    from learner.backends.megatron.model import kernels

TokenLoss = Callable[[Tensor, slice], Tensor]
"""From the float32 log-probabilities [n] of a slice of the trained tokens to the sum of their losses."""


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_loss: TokenLoss,
    *,
    temperature: float,
    group: dist.ProcessGroup | None = None,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, which carries gradient, and without it float32 log-probabilities and entropy [N].

    Args:
        hidden: [N, H], inputs of the output layer; under tensor parallelism each rank's gradient of it is
            partial, to be summed by whoever made it.
        weight: [v, H], this rank's part of the output layer.
        labels: int64 [N], counted from the first row of this rank's part.
        token_loss: the loss.
        temperature: divides the logits, as it did when the tokens were sampled.
        group: tensor-parallel ranks that share the vocabulary; `None` is one rank.
        chunk_size: rows of logits alive at a time.
    """
    loss, logprobs, entropy = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, token_loss, 1.0 / temperature, group, chunk_size
    )
    return loss, logprobs, entropy


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        token_loss: TokenLoss,
        scale: float,
        group: dist.ProcessGroup | None,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Go through the chunks, gradients included."""
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        for start in range(0, len(hidden), chunk_size):
            rows = slice(start, min(start + chunk_size, len(hidden)))
            logits = hidden[rows] @ weight.t()
            column, here = local_columns(labels[rows], logits.shape[-1])
            logprobs[rows], entropy[rows], log_total = _statistics(logits, column, here, scale, group)
            with torch.enable_grad():
                leaf = logprobs[rows].requires_grad_()
                chunk_loss = token_loss(leaf, rows)
                [slope] = torch.autograd.grad(chunk_loss, leaf)
            loss += chunk_loss.detach()
            grad = _logits_gradient(logits, column, here, log_total, slope, scale)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                add_product(grad_weight, grad.t(), hidden[rows])
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(logprobs, entropy)
        return loss, logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Scale what the forward pass found."""
        of_hidden, of_weight = ctx.saved_tensors
        return (
            None if of_hidden is None else of_hidden.mul_(grad),
            None if of_weight is None else of_weight.mul_(grad).to(ctx.weight_dtype),
            *(None,) * 5,
        )


def local_columns(labels: Tensor, local_vocab: int) -> tuple[Tensor, Tensor]:
    """Return each label's column [N, 1] on this rank, and whether it lies here."""
    column = labels[:, None]
    here = (column >= 0) & (column < local_vocab)
    return torch.where(here, column, 0), here


def _statistics(
    logits: Tensor, column: Tensor, here: Tensor, scale: float, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each label, entropy and log of the sum of exponentials, over all ranks."""
    largest, total, weighted = _softmax_sums(logits, scale)
    label = torch.where(here, logits.gather(-1, column).float() * scale, 0.0)[:, 0]
    if group is not None and group.size() > 1:
        mine = largest.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shrink = (mine - largest).exp()
        sums = torch.stack((label, total * shrink, (weighted + (mine - largest) * total) * shrink))
        dist.all_reduce(sums, group=group)
        label, total, weighted = sums
    log_total = total.log()
    return label - largest - log_total, log_total - weighted / total, largest + log_total


def _softmax_sums(logits: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row x of scaled logits: max x, sum exp(x - max x), sum exp(x - max x) (x - max x)."""
    if logits.is_cuda:
        return kernels.softmax_sums(logits, scale)
    scaled = logits.float() * scale
    largest = scaled.amax(-1)
    shifted = scaled - largest[:, None]
    exponentials = shifted.exp()
    return largest, exponentials.sum(-1), torch.linalg.vecdot(exponentials, shifted)


def _logits_gradient(
    logits: Tensor, column: Tensor, here: Tensor, log_total: Tensor, slope: Tensor, scale: float
) -> Tensor:
    """d loss / d logits = slope * (onehot - softmax) * scale, in the dtype of the logits."""
    slope = slope * scale
    if logits.is_cuda:
        label = torch.where(here, column, -1)[:, 0]
        return kernels.logits_gradient(logits, label, log_total, slope, scale)
    slope = slope[:, None]
    softmax = (logits.float() * scale - log_total[:, None]).exp()
    is_label = here & (torch.arange(logits.shape[-1], device=logits.device) == column)
    return (torch.where(is_label, slope, 0.0) - softmax * slope).to(logits.dtype)
