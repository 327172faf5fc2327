"""The kernels for CUDA that torch.compile writes at half the speed of memory or less. Imported only there.

Each computes in float32 and rounds once, to the dtype of its input.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 8192
"""Of a row of logits, taken at a time."""


def softmax_sums(logits: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row x of scaled logits: max x, sum exp(x - max x), sum exp(x - max x) (x - max x); float32."""
    largest = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    total, weighted = torch.empty_like(largest), torch.empty_like(largest)
    _softmax_sums[(len(logits),)](
        logits,
        logits.stride(0),
        largest,
        total,
        weighted,
        logits.shape[1],
        scale,
        block=COLUMNS,
        num_warps=8,
    )
    return largest, total, weighted


@triton.jit  # type: ignore[untyped-decorator]
def _softmax_sums(logits, stride, largest, total, weighted, columns, scale, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Online softmax (arXiv:1805.02867), with the sum that the entropy needs besides."""
    row = tl.program_id(0).to(tl.int64)
    lowest = -1e30  # finite, so that its difference to a logit times 0 is 0
    m, s, w = lowest, 0.0, 0.0
    for begin in range(0, columns, block):
        column = begin + tl.arange(0, block)
        inside = column < columns
        x = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32) * scale
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


def logits_gradient(logits: Tensor, label: Tensor, log_total: Tensor, slope: Tensor, scale: float) -> Tensor:
    """learner.head's gradient of the logits, in their place; a label that is elsewhere is -1."""
    _logits_gradient[(len(logits), triton.cdiv(logits.shape[1], COLUMNS))](
        logits,
        logits.stride(0),
        label,
        log_total,
        slope,
        logits.shape[1],
        scale,
        block=COLUMNS,
        num_warps=8,
    )
    return logits


@triton.jit  # type: ignore[untyped-decorator]
def _logits_gradient(logits, stride, label, log_total, slope, columns, scale, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < columns
    place = logits + row * stride + column
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32) * scale
    softmax = tl.exp(x - tl.load(log_total + row))
    onehot = tl.where(column == tl.load(label + row), 1.0, 0.0)
    tl.store(place, (tl.load(slope + row) * (onehot - softmax)).to(logits.dtype.element_ty), mask=inside)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """learner.attention's rotation of [T, heads, d] by [T, 1, d], or the one that undoes it."""
    tokens, heads, width = x.shape
    out = torch.empty((tokens, heads, width), dtype=x.dtype, device=x.device)
    half = width // 2
    _rotated[(tokens,)](
        x,
        x.stride(0),
        x.stride(1),
        cos,
        sin,
        out,
        heads,
        -1.0 if back else 1.0,
        half=half,
        row=triton.next_power_of_2(half),
        rows=triton.next_power_of_2(heads),
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _rotated(  # type: ignore[no-untyped-def]  # noqa: PLR0913 - a kernel
    x, of_token, of_head, cos, sin, out, heads, direction,
    half: tl.constexpr, row: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, place = tl.arange(0, rows)[:, None], tl.arange(0, row)[None]
    inside = (head < heads) & (place < half)
    at = x + token * of_token + head * of_head + place
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    angle = token * 2 * half + place
    c = tl.load(cos + angle, mask=place < half, other=0.0).to(tl.float32)
    s = tl.load(sin + angle + half, mask=place < half, other=0.0).to(tl.float32) * direction
    to = out + (token * heads + head) * 2 * half + place
    tl.store(to, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(to + half, (second * c + first * s).to(out.dtype.element_ty), mask=inside)


def swiglu_back(grad: Tensor, gate_and_up: Tensor) -> Tensor:
    """Gradient [..., 2 F] of silu(gate) * up, from that of the result and from both halves [..., 2 F]."""
    grad, gate_and_up = grad.contiguous(), gate_and_up.contiguous()
    width = grad.shape[-1]
    out = torch.empty_like(gate_and_up)
    _swiglu_back[(grad.numel() // width, triton.cdiv(width, 1024))](grad, gate_and_up, out, width, block=1024)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu_back(grad, gate_and_up, out, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    at = row * 2 * width + column
    g = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_and_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_and_up + at + width, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(out + at, (g * up * slope).to(out.dtype.element_ty), mask=inside)
    tl.store(out + at + width, (g * gate * sigmoid).to(out.dtype.element_ty), mask=inside)
