"""The output layer and what a loss needs of it, so that logits [T, V] never exist.

A loss that is a sum over tokens has its gradient at each token as soon as that token's log-probability and
entropy are known. So `output_layer_loss` takes the trained tokens chunk by chunk in the forward pass: logits,
log-probabilities, loss, gradient of the logits, and from it those of the hidden states and the weight; the
logits are forgotten before the next chunk, and none is computed twice. The backward pass only hands out what
is there (as liger-kernel does for cross-entropy, arXiv:2410.10989, section 3.2).

A loss that looks at several tokens at once, such as the mean log ratio of a sequence, first needs the
log-probabilities of all of them. `label_logprobs` computes these, and computes the logits a second time,
chunk by chunk, when the gradient comes back.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from learner.backends.megatron.multi_tensor import add_product

if torch.cuda.is_available():  # triton comes with torch for CUDA only
    from learner.backends.megatron.model import kernels

TokenLoss = Callable[[Tensor, Tensor, slice], Tensor]
"""A token loss takes the float32 log-probabilities [n] and entropies [n] of a slice of the trained tokens,
and the slice, and returns the sum of their losses."""


class RowStatistics(NamedTuple):
    """Results of the softmax of each row of logits, over all ranks that share the vocabulary; float32 [n]."""

    logprobs: Tensor
    """Log-probability of the label, nats."""
    entropy: Tensor
    """Entropy of the row's distribution, nats."""
    log_total: Tensor
    """Logarithm of the sum of the exponentials of the scaled logits."""


def output_layer_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_loss: TokenLoss,
    *,
    temperatures: Tensor,
    group: dist.ProcessGroup | None = None,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, which carries gradient, and without it float32 log-probabilities and entropy [N].

    Args:
        hidden: [N, H], inputs of the output layer; under tensor parallelism each rank's gradient of it is
            partial, to be summed by whoever made it.
        weight: [v, H], this rank's part of the output layer.
        labels: int64 [N], counted from the first row of this rank's part.
        token_loss: the loss, a sum over tokens; it may use the entropy, with gradient.
        temperatures: float32 [N], which divide the logits, as they did when each token was sampled.
        group: tensor-parallel ranks that share the vocabulary; `None` is one rank.
        chunk_size: rows of logits alive at a time.
    """
    loss, logprobs, entropy = _OutputLayerLoss.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, token_loss, temperatures.reciprocal(), group, chunk_size
    )
    return loss, logprobs, entropy


class _OutputLayerLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        token_loss: TokenLoss,
        scale: Tensor,
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
            found = _statistics(logits, column, here, scale[rows], group)
            logprobs[rows], entropy[rows] = found.logprobs, found.entropy
            chunk_loss, slopes = _loss_and_slopes(token_loss, found, rows)
            loss += chunk_loss
            grad = _logits_gradient(logits, column, here, found, *slopes, scale[rows])
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


def _loss_and_slopes(
    token_loss: TokenLoss, found: RowStatistics, rows: slice
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """Return a chunk's loss and its slopes in the log-probabilities and the entropies; `None` is no slope."""
    with torch.enable_grad():
        leaves = found.logprobs.detach().requires_grad_(), found.entropy.detach().requires_grad_()
        loss = token_loss(*leaves, rows)
        of_logprobs, of_entropy = torch.autograd.grad(loss, leaves, allow_unused=True)
    return loss.detach(), (of_logprobs, of_entropy)


def label_logprobs(
    hidden: Tensor,
    project: Callable[[Tensor], Tensor],
    labels: Tensor,
    *,
    temperatures: Tensor,
    group: dist.ProcessGroup | None = None,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Return float32 log-probabilities [N] of `labels` and entropies [N], in nats; both carry gradient.

    Args:
        hidden: [N, H], inputs of the output layer.
        project: the output layer, [c, H] to the logits [c, v] of this rank's part of the vocabulary.
        labels: int64 [N], counted from the first of this rank's part.
        temperatures: float32 [N], which divide the logits, as they did when each token was sampled.
        group: tensor-parallel ranks that share the vocabulary; `None` is one rank.
        chunk_size: rows of logits alive at a time; more rows are recomputed in the backward pass.
    """

    def one_chunk(rows: Tensor, targets: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, entropy = _LabelLogprobs.apply(project(rows), targets, scale, group)  # type: ignore[no-untyped-call]
        return logprobs, entropy

    scale = temperatures.reciprocal()
    if len(hidden) <= chunk_size:
        return one_chunk(hidden, labels, scale)
    chunks = [
        checkpoint(one_chunk, *parts, use_reentrant=False)
        for parts in zip(*(torch.split(each, chunk_size) for each in (hidden, labels, scale)), strict=True)
    ]
    return torch.cat([logprobs for logprobs, _ in chunks]), torch.cat([entropy for _, entropy in chunks])


class _LabelLogprobs(torch.autograd.Function):
    """log softmax(scale * logits)[label] and the entropy, over a vocabulary split across ranks."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, scale: Tensor, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        """Compute in float32; keep the logits for the backward pass."""
        column, here = local_columns(labels, logits.shape[-1])
        found = _statistics(logits, column, here, scale, group)
        ctx.save_for_backward(logits, column, here, scale, *found)
        ctx.set_materialize_grads(
            False
        )  # most losses have no gradient in the entropy, which then costs nothing
        return found.logprobs, found.entropy

    @staticmethod
    def backward(
        ctx: Any, of_logprobs: Tensor | None, of_entropy: Tensor | None
    ) -> tuple[Tensor, None, None, None]:
        """Leave the logits as they are, though on CUDA the gradient is written over what it is made from."""
        logits, column, here, scale, *found = ctx.saved_tensors
        if logits.is_cuda:
            logits = logits.clone()
        grad = _logits_gradient(logits, column, here, RowStatistics(*found), of_logprobs, of_entropy, scale)
        return grad, None, None, None


def local_columns(labels: Tensor, local_vocab: int) -> tuple[Tensor, Tensor]:
    """Return each label's column [N, 1] on this rank, and whether it lies here."""
    column = labels[:, None]
    here = (column >= 0) & (column < local_vocab)
    return torch.where(here, column, 0), here


def _statistics(
    logits: Tensor, column: Tensor, here: Tensor, scale: Tensor, group: dist.ProcessGroup | None
) -> RowStatistics:
    largest, total, weighted = _softmax_sums(logits, scale)
    label = torch.where(here, logits.gather(-1, column).float() * scale[:, None], 0.0)[:, 0]
    if group is not None and group.size() > 1:
        # Each rank has the sums of its own columns, relative to its own largest logit.
        mine = largest.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shrink = (mine - largest).exp()
        sums = torch.stack((label, total * shrink, (weighted + (mine - largest) * total) * shrink))
        dist.all_reduce(sums, group=group)
        label, total, weighted = sums
    log_total = total.log()
    return RowStatistics(label - largest - log_total, log_total - weighted / total, largest + log_total)


def _softmax_sums(logits: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return max x, sum exp(x - max x) and sum exp(x - max x) (x - max x) of each row x of scaled logits."""
    if logits.is_cuda:
        return kernels.softmax_sums(logits, scale)
    scaled = logits.float() * scale[:, None]
    largest = scaled.amax(-1)
    shifted = scaled - largest[:, None]
    exponentials = shifted.exp()
    return largest, exponentials.sum(-1), torch.linalg.vecdot(exponentials, shifted)


def _logits_gradient(
    logits: Tensor,
    column: Tensor,
    here: Tensor,
    found: RowStatistics,
    of_logprobs: Tensor | None,
    of_entropy: Tensor | None,
    scale: Tensor,
) -> Tensor:
    """Return d loss / d logits, in their dtype, from the loss's slopes in log-probabilities and entropies.

    With x = scale * logits and p = softmax(x): d log p[label] / d x = onehot - p and
    d entropy / d x = -p (log p + entropy). A slope of `None` is 0.
    """
    slope = torch.zeros_like(scale) if of_logprobs is None else of_logprobs * scale
    entropy_slope = None if of_entropy is None else of_entropy * scale
    if logits.is_cuda:
        label = torch.where(here, column, -1)[:, 0]
        return kernels.logits_gradient(
            logits, label, found.log_total, found.entropy, slope, entropy_slope, scale
        )
    log_softmax = logits.float() * scale[:, None] - found.log_total[:, None]
    softmax = log_softmax.exp()
    is_label = here & (torch.arange(logits.shape[-1], device=logits.device) == column)
    slope = slope[:, None]
    grad = torch.where(is_label, slope, 0.0) - softmax * slope
    if entropy_slope is not None:
        grad -= entropy_slope[:, None] * softmax * (log_softmax + found.entropy[:, None])
    return grad.to(logits.dtype)
