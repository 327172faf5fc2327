"""Triton kernels of the output layer for CUDA, which are twice as fast as what torch.compile writes or
more. Imported only there.

Each computes in float32 and rounds once, to the dtype of its input."""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 8192
"""Number of logits of a row that are taken at a time."""


def softmax_sums(logits: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return max x, sum exp(x - max x) and sum exp(x - max x) (x - max x) of each row x of scaled logits.

    Args:
        logits: [n, V].
        scale: float32 [n], what each row is multiplied by.

    Returns float32 [n] each."""
    largest = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    total, weighted = torch.empty_like(largest), torch.empty_like(largest)
    _softmax_sums[(len(logits),)](
        logits, logits.stride(0), largest, total, weighted, logits.shape[1], scale, block=COLUMNS, num_warps=8
    )
    return largest, total, weighted


@triton.jit  # type: ignore[untyped-decorator]
def _softmax_sums(logits, stride, largest, total, weighted, columns, scale, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Online softmax (arXiv:1805.02867), with the sum that the entropy needs besides."""
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(scale + row)
    lowest = -1e30  # finite: the difference to a logit times 0 is 0
    m, s, w = lowest, 0.0, 0.0
    for begin in range(0, columns, block):
        column = begin + tl.arange(0, block)
        inside = column < columns
        x = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32) * factor
        x = tl.where(inside, x, lowest)
        new = tl.maximum(m, tl.max(x, 0))
        shifted = x - new
        e = tl.exp(shifted)
        shrink = tl.exp(m - new)
        w = shrink * (w + (m - new) * s) + tl.sum(tl.where(inside, e * shifted, 0.0), 0)
        s = shrink * s + tl.sum(e, 0)
        m = new
    tl.store(largest + row, m)
    tl.store(total + row, s)
    tl.store(weighted + row, w)


def logits_gradient(
    logits: Tensor,
    label: Tensor,
    log_total: Tensor,
    entropy: Tensor,
    slope: Tensor,
    entropy_slope: Tensor | None,
    scale: Tensor,
) -> Tensor:
    """Write the gradient of the logits in their place (output_layer.py); a label that is elsewhere is -1.

    Args:
        logits: [n, V].
        label: int64 [n], the column of each row's label.
        log_total: float32 [n], logarithm of the sum of the exponentials.
        entropy: float32 [n], nats.
        slope: float32 [n], of the loss in the log-probabilities, times `scale`.
        entropy_slope: float32 [n], of the loss in the entropies, times `scale`; `None` is 0 at no cost.
        scale: float32 [n], what each row is multiplied by."""
    _logits_gradient[(len(logits), triton.cdiv(logits.shape[1], COLUMNS))](
        logits,
        logits.stride(0),
        label,
        log_total,
        entropy,
        slope,
        slope if entropy_slope is None else entropy_slope,
        logits.shape[1],
        scale,
        with_entropy=entropy_slope is not None,
        block=COLUMNS,
        num_warps=8,
    )
    return logits


@triton.jit  # type: ignore[untyped-decorator]
def _logits_gradient(  # type: ignore[no-untyped-def]  # noqa: PLR0913 - a kernel takes no structures
    logits, stride, label, log_total, entropy, slope, entropy_slope, columns, scale,
    with_entropy: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < columns
    place = logits + row * stride + column
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32) * tl.load(scale + row)
    log_softmax = x - tl.load(log_total + row)
    softmax = tl.exp(log_softmax)
    onehot = tl.where(column == tl.load(label + row), 1.0, 0.0)
    grad = tl.load(slope + row) * (onehot - softmax)
    if with_entropy:
        grad -= tl.load(entropy_slope + row) * softmax * (log_softmax + tl.load(entropy + row))
    tl.store(place, grad.to(logits.dtype.element_ty), mask=inside)
