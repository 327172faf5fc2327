"""The output layer and what a loss needs of it, so that logits [T, V] never exist.

A loss that is a sum over tokens has its gradient at each token as soon as that token's log-probability and
entropy are known. So `output_layer_loss` takes the trained tokens chunk by chunk in the forward pass: logits,
log-probabilities, loss, gradient of the logits, and from it those of the hidden states and the weight; the
logits are forgotten before the next chunk, and none is computed twice. The backward pass only hands out what
is there (as liger-kernel does for cross-entropy, arXiv:2410.10989, section 3.2).

A loss that looks at several tokens at once, such as the mean log ratio of a sequence, first needs the
log-probabilities of all of them. `label_logprobs` computes these, and computes the logits a second time,
chunk by chunk, when the gradient comes back.

Some models bound their logits: x becomes cap * tanh(x / cap), before the temperature divides it.

A label that was drawn from a kept set of tokens alone has its log-probability there: the logit less the
logarithm of the sum of the exponentials of the kept logits. The entropy stays that of the whole vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from learner.backends.shared.multi_tensor import add_product
from storage.exact_arithmetic.softmax import block_rows

if torch.cuda.is_available():  # triton comes with torch for CUDA only
    from learner.backends.output import kernels

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
    kept_logprobs: Tensor | None = None
    """[n, K], log-probability within the row's kept set of each of its tokens; -inf behind the set."""


class KeptColumns(NamedTuple):
    """The kept sets of N rows, as columns of the logits."""

    columns: Tensor
    """int64 [N, K], counted from the first of this rank's part; any number behind the set."""
    inside: Tensor
    """bool [N, K], False behind the set. A row without a kept set has none that is True."""

    def rows(self, rows: slice) -> "KeptColumns":
        """Return the sets of some of the rows."""
        return KeptColumns(self.columns[rows], self.inside[rows])


@overload
def kept_columns(token_ids: Tensor, first: int) -> KeptColumns: ...
@overload
def kept_columns(token_ids: Tensor | None, first: int) -> KeptColumns | None: ...
def kept_columns(token_ids: Tensor | None, first: int) -> KeptColumns | None:
    """Return the kept sets [N, K], which end with -1, of a rank whose first column is token `first`."""
    if token_ids is None:
        return None
    return KeptColumns(token_ids.long() - first, token_ids >= 0)


def output_layer_loss(  # noqa: PLR0913 - what a chunk needs, and its bounds
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_loss: TokenLoss,
    *,
    temperatures: Tensor,
    kept: KeptColumns | None = None,
    group: dist.ProcessGroup | None = None,
    chunk_size: int,
    cap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, which carries gradient, and without it float32 log-probabilities and entropy [N].

    Args:
        hidden: [N, H], inputs of the output layer; under tensor parallelism each rank's gradient of it is
            partial, to be summed by whoever made it.
        weight: [v, H], this rank's part of the output layer.
        labels: int64 [N], counted from the first row of this rank's part.
        token_loss: the loss, a sum over tokens; it may use the entropy, with gradient.
        temperatures: float32 [N], which divide the logits, as they did when each token was sampled.
        kept: what each label was drawn from; `None` is the whole vocabulary for all.
        group: tensor-parallel ranks that share the vocabulary; `None` is one rank.
        chunk_size: rows of logits alive at a time.
        cap: bound on the magnitude of logits; `None` is none."""
    loss, logprobs, entropy = _OutputLayerLoss.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, token_loss, temperatures.reciprocal(), kept, group, chunk_size, cap
    )
    return loss, logprobs, entropy


class _OutputLayerLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913 - autograd takes them one by one
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        token_loss: TokenLoss,
        scale: Tensor,
        kept: KeptColumns | None,
        group: dist.ProcessGroup | None,
        chunk_size: int,
        cap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        for start in range(0, len(hidden), chunk_size):
            rows = slice(start, min(start + chunk_size, len(hidden)))
            logits = hidden[rows] @ weight.t()
            of_cap = None
            if cap is not None:
                logits = capped(logits, cap)
                of_cap = 1 - (logits / cap).square()
            column, here = local_columns(labels[rows], logits.shape[-1])
            kept_here = None if kept is None else kept.rows(rows)
            found = _statistics(logits, column, here, scale[rows], kept_here, group)
            logprobs[rows], entropy[rows] = found.logprobs, found.entropy
            chunk_loss, slopes = _loss_and_slopes(token_loss, found, rows)
            loss += chunk_loss
            grad = _logits_gradient(logits, column, here, found, *slopes, scale[rows], kept_here)
            if of_cap is not None:
                grad *= of_cap
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                add_product(grad_weight, grad.t(), hidden[rows])
            del logits, grad, of_cap  # before the next chunk has its own
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(logprobs, entropy)
        return loss, logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight = ctx.saved_tensors
        return (
            None if of_hidden is None else of_hidden.mul_(grad),
            None if of_weight is None else of_weight.mul_(grad).to(ctx.weight_dtype),
            *(None,) * 7,
        )


def capped(logits: Tensor, cap: float) -> Tensor:
    """Return the logits within a bound, as transformers computes it."""
    return torch.tanh(logits / cap) * cap


def _loss_and_slopes(
    token_loss: TokenLoss, found: RowStatistics, rows: slice
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
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
    kept: KeptColumns | None = None,
    group: dist.ProcessGroup | None = None,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Return float32 log-probabilities [N] of `labels` and entropies [N], in nats; both carry gradient.

    Args:
        hidden: [N, H], inputs of the output layer.
        project: the output layer, [c, H] to the logits [c, v] of this rank's part of the vocabulary.
        labels: int64 [N], counted from the first of this rank's part.
        temperatures: float32 [N], which divide the logits, as they did when each token was sampled.
        kept: what each label was drawn from; `None` is the whole vocabulary for all.
        group: tensor-parallel ranks that share the vocabulary; `None` is one rank.
        chunk_size: rows of logits alive at a time; more rows are recomputed in the backward pass."""

    def one_chunk(rows: Tensor, targets: Tensor, scale: Tensor, *sets: Tensor) -> tuple[Tensor, Tensor]:
        return logprobs_of_logits(project(rows), targets, scale, KeptColumns(*sets) if sets else None, group)

    parts = hidden, labels, temperatures.reciprocal(), *(kept or ())
    logprobs, entropy = in_chunks(one_chunk, parts, chunk_size)
    return logprobs, entropy


def in_chunks(
    one_chunk: Callable[..., tuple[Tensor, ...]], parts: Sequence[Tensor], chunk_size: int
) -> tuple[Tensor, ...]:
    """Call `one_chunk` with so many rows of all `parts` at a time, and join what it returns. Several chunks
    are computed again in the backward pass, so that nothing of them is kept."""
    if len(parts[0]) <= chunk_size:
        return one_chunk(*parts)
    chunks = [
        checkpoint(one_chunk, *each, use_reentrant=False)
        for each in zip(*(torch.split(part, chunk_size) for part in parts), strict=True)
    ]
    return tuple(torch.cat(found) for found in zip(*chunks, strict=True))


def logprobs_of_logits(
    logits: Tensor, labels: Tensor, scale: Tensor, kept: KeptColumns | None, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Return what `label_logprobs` does, of logits [n, v] that are there, times `scale` [n]."""
    logprobs, entropy = _LabelLogprobs.apply(logits, labels, scale, kept, group)  # type: ignore[no-untyped-call]
    return logprobs, entropy


class _LabelLogprobs(torch.autograd.Function):
    """log softmax(scale * logits)[label] and the entropy, over a vocabulary split across ranks."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, scale: Tensor, kept: KeptColumns | None,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        column, here = local_columns(labels, logits.shape[-1])
        found = _statistics(logits, column, here, scale, kept, group)
        ctx.save_for_backward(logits, column, here, scale, *found, *(kept or (None, None)))
        ctx.set_materialize_grads(
            False
        )  # most losses have no gradient in the entropy, which then costs nothing
        return found.logprobs, found.entropy

    @staticmethod
    def backward(
        ctx: Any, of_logprobs: Tensor | None, of_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        logits, column, here, scale, *found, columns, inside = ctx.saved_tensors
        kept = None if columns is None else KeptColumns(columns, inside)
        grad = _logits_gradient(
            logits.clone(), column, here, RowStatistics(*found), of_logprobs, of_entropy, scale, kept
        )
        return grad, *(None,) * 4


def local_columns(labels: Tensor, local_vocab: int) -> tuple[Tensor, Tensor]:
    """Return each label's column [N, 1] on this rank, and whether it lies here."""
    column = labels[:, None]
    here = (column >= 0) & (column < local_vocab)
    return torch.where(here, column, 0), here


def _statistics(
    logits: Tensor, column: Tensor, here: Tensor, scale: Tensor, kept: KeptColumns | None,
    group: dist.ProcessGroup | None,
) -> RowStatistics:  # fmt: skip
    largest, total, weighted = softmax_sums(logits, scale)
    label = torch.where(here, logits.gather(-1, column).float() * scale[:, None], 0.0)[:, 0]
    largest, label, total, weighted = sums_over_ranks(largest, label, total, weighted, group)
    log_total = total.log()
    logprobs, entropy = label - largest - log_total, log_total - weighted / total
    if kept is None:
        return RowStatistics(logprobs, entropy, largest + log_total)
    of_kept = _kept_logits(logits, scale, kept, group)
    has_set = kept.inside.any(-1)
    # a row without a set takes the logarithm of a sum of nothing, which is not used
    normaliser = torch.where(has_set, of_kept.logsumexp(-1), 0.0)
    logprobs = torch.where(has_set, label - normaliser, logprobs)
    return RowStatistics(logprobs, entropy, largest + log_total, of_kept - normaliser[:, None])


def sums_over_ranks(
    largest: Tensor, label: Tensor, total: Tensor, weighted: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Join what each rank has of its own columns, relative to its own largest logit: `softmax_sums` [n] each,
    and `label` [n], which is added up as it is. Returns them in the order of the arguments."""
    if group is None or group.size() == 1:
        return largest, label, total, weighted
    mine = largest.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    shrink = (mine - largest).exp()
    sums = torch.stack((label, total * shrink, (weighted + (mine - largest) * total) * shrink))
    dist.all_reduce(sums, group=group)
    label, total, weighted = sums
    return largest, label, total, weighted


def _kept_logits(logits: Tensor, scale: Tensor, kept: KeptColumns, group: dist.ProcessGroup | None) -> Tensor:
    """Return the scaled logits of the kept tokens, float32 [n, K]; -inf behind each set."""
    values, _, _ = scaled_logits(logits, scale, kept, group)
    return values.masked_fill(~kept.inside, -torch.inf)


def scaled_logits(
    logits: Tensor, scale: Tensor, chosen: KeptColumns, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scaled logits of chosen tokens, float32 [n, K], and what `columns_here` does."""
    column, here = columns_here(chosen, logits.shape[-1])
    values = torch.where(here, logits.gather(-1, column).float() * scale[:, None], 0.0)
    if group is not None and group.size() > 1:
        dist.all_reduce(values, group=group)  # each token's logit is on one rank
    return values, column, here


def columns_here(kept: KeptColumns, local_vocab: int) -> tuple[Tensor, Tensor]:
    """Return the column of each kept token on this rank [n, K], and whether it lies here."""
    here = kept.inside & (kept.columns >= 0) & (kept.columns < local_vocab)
    return torch.where(here, kept.columns, 0), here


def softmax_sums(logits: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return max x, sum exp(x - max x) and sum exp(x - max x) (x - max x) of each row x of scaled logits."""
    if logits.is_cuda:
        return kernels.softmax_sums(logits, scale)
    blocks = -(-len(logits) // block_rows(logits.shape[-1])) or 1
    parts = zip(logits.tensor_split(blocks), scale.tensor_split(blocks), strict=True)
    largest, total, weighted = map(torch.cat, zip(*(_sums_of_block(*part) for part in parts), strict=True))
    return largest, total, weighted


def _sums_of_block(logits: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    shifted = logits.float() * scale[:, None]
    largest = shifted.amax(-1)
    shifted -= largest[:, None]
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
    kept: KeptColumns | None = None,
) -> Tensor:
    """Return d loss / d logits, in their dtype and perhaps their memory, from the loss's slopes in
    log-probabilities and entropies.

    With x = scale * logits and p = softmax(x): d log p[label] / d x = onehot - p and
    d entropy / d x = -p (log p + entropy). A slope of `None` is 0. Of a row with a kept set p is that of the
    set in the first, so that only its columns have a gradient."""
    slope = torch.zeros_like(scale) if of_logprobs is None else of_logprobs * scale
    if kept is None or found.kept_logprobs is None:
        return whole_gradient(logits, column, here, found, slope, of_entropy, scale)
    has_set = kept.inside.any(-1)
    columns, kept_here = columns_here(kept, logits.shape[-1])
    is_label = here & (columns == column)
    within = slope[:, None] * (is_label.float() - found.kept_logprobs.exp())
    within = torch.where(kept_here, within, 0.0).to(logits.dtype)
    others = torch.where(has_set, 0.0, slope)
    return whole_gradient(logits, column, here, found, others, of_entropy, scale).scatter_add_(
        -1, columns, within
    )


def whole_gradient(
    logits: Tensor,
    column: Tensor,
    here: Tensor,
    found: RowStatistics,
    slope: Tensor,
    of_entropy: Tensor | None,
    scale: Tensor,
) -> Tensor:
    """Return the gradient over the whole vocabulary; `slope` [n] is that in the scaled logits' log-probs. The
    logits are written over."""
    entropy_slope = None if of_entropy is None else of_entropy * scale
    if logits.is_cuda:
        label = torch.where(here, column, -1)[:, 0]
        return kernels.logits_gradient(
            logits, label, found.log_total, found.entropy, slope, entropy_slope, scale
        )
    grad = logits.float().mul_(scale[:, None])
    grad -= found.log_total[:, None]
    slope = slope[:, None]
    if entropy_slope is None:
        grad.exp_().mul_(-slope)
    else:
        softmax = grad.exp()
        grad += found.entropy[:, None]
        grad.mul_(softmax).mul_(-entropy_slope[:, None])
        grad -= softmax.mul_(slope)
    grad.scatter_add_(-1, column, torch.where(here, slope, 0.0))
    return grad.to(logits.dtype)
