"""Triton kernels of what stands between the matrix products of a layer. Imported only on CUDA.

Each computes in float32 and rounds once, to the dtype of its input. Tensors are read where they lie: only the
elements of a row must follow one another."""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 264
"""Programs that share a sum over rows: two for each multiprocessor of an H200."""
TILE = 4096
"""Elements that a program norms at a time, unless a single row has more."""
BLOCK = 1024
"""Elements of a row that a program gates at a time."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, centred: bool) -> Tensor:
    """functions.rms_norm's result of rows [N, width]."""
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        row, several, warps = _tile(width)
        _rms_norm[(triton.cdiv(rows, several),)](
            x,
            x.stride(0),
            weight,
            out,
            rows,
            eps,
            centred=centred,
            width=width,
            row=row,
            several=several,
            num_warps=warps,
        )
    return out


def _tile(width: int) -> tuple[int, int, int]:
    """Return the columns and rows of a tile for rows of this width, and the warps that share it."""
    row = int(triton.next_power_of_2(width))
    return row, max(1, TILE // row), 8 if row <= TILE else 16


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm(  # type: ignore[no-untyped-def]  # noqa: PLR0913 - a kernel
    x, x_of_row, weight, out, rows, eps,
    centred: tl.constexpr, width: tl.constexpr, row: tl.constexpr, several: tl.constexpr,
):  # fmt: skip
    at, place = (tl.program_id(0) * several + tl.arange(0, several)).to(tl.int64)[:, None], tl.arange(0, row)
    inside = (at < rows) & (place < width)[None]
    values = tl.load(x + at * x_of_row + place[None], mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + place, mask=place < width, other=0.0).to(tl.float32)
    if centred:
        factor += 1.0
    scale = tl.rsqrt(tl.sum(values * values, 1)[:, None] / width + eps)
    found = (values * scale * factor[None]).to(out.dtype.element_ty)
    tl.store(out + at * width + place[None], found, mask=inside)


def rms_norm_back(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, *, centred: bool, of_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """functions.rms_norm's gradients of x, and where it is wanted of the weight."""
    rows, width = x.shape
    of_x = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if not rows:
        return of_x, torch.zeros_like(weight) if of_weight else None
    row, several, warps = _tile(width)
    tiles = int(triton.cdiv(rows, several))
    programs = min(tiles, PROGRAMS)
    partial = torch.empty((programs, width) if of_weight else 0, dtype=torch.float32, device=x.device)
    _rms_norm_back[(programs,)](
        grad,
        grad.stride(0),
        x,
        x.stride(0),
        weight,
        of_x,
        partial,
        rows,
        tiles,
        eps,
        centred=centred,
        of_weight=of_weight,
        width=width,
        row=row,
        several=several,
        num_warps=warps,
    )
    return of_x, partial.sum(0).to(weight.dtype) if of_weight else None


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm_back(  # type: ignore[no-untyped-def]  # noqa: PLR0913 - a kernel
    grad, grad_of_row, x, x_of_row, weight, of_x, partial, rows, tiles, eps,
    centred: tl.constexpr, of_weight: tl.constexpr,
    width: tl.constexpr, row: tl.constexpr, several: tl.constexpr,
):  # fmt: skip
    place = tl.arange(0, row)
    factor = tl.load(weight + place, mask=place < width, other=0.0).to(tl.float32)
    if centred:
        factor += 1.0
    slope = tl.zeros((several, row), tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        at = (tile * several + tl.arange(0, several)).to(tl.int64)[:, None]
        inside = (at < rows) & (place < width)[None]
        values = tl.load(x + at * x_of_row + place[None], mask=inside, other=0.0).to(tl.float32)
        back = tl.load(grad + at * grad_of_row + place[None], mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(values * values, 1)[:, None] / width + eps)
        values *= scale
        if of_weight:
            slope += back * values
        back *= factor[None]
        mean = tl.sum(back * values, 1)[:, None] / width
        found = ((back - values * mean) * scale).to(of_x.dtype.element_ty)
        tl.store(of_x + at * width + place[None], found, mask=inside)
    if of_weight:
        tl.store(partial + tl.program_id(0) * width + place, tl.sum(slope, 0), mask=place < width)


def gated(gate: Tensor, up: Tensor, *, tanh: bool) -> Tensor:
    """functions.gated's result of rows [N, width]; with `tanh`, of GELU by tanh, else of SiLU."""
    rows, width = gate.shape
    out = torch.empty((rows, width), dtype=gate.dtype, device=gate.device)
    if rows:
        grid = (rows, triton.cdiv(width, BLOCK))
        _gated[grid](gate, gate.stride(0), up, up.stride(0), out, width, tanh=tanh, block=BLOCK)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _gated(  # type: ignore[no-untyped-def]
    gate, gate_of_row, up, up_of_row, out, width, tanh: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * block + tl.arange(0, block)
    inside = place < width
    g = tl.load(gate + row * gate_of_row + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_of_row + place, mask=inside, other=0.0).to(tl.float32)
    sigmoid, _ = _sigmoid_and_slope(g, tanh)
    tl.store(out + row * width + place, (g * sigmoid * u).to(out.dtype.element_ty), mask=inside)


def gated_back(grad: Tensor, gate: Tensor, up: Tensor, of_gate: Tensor, of_up: Tensor, *, tanh: bool) -> None:
    """Write functions.gated's gradients of rows [N, width]."""
    rows, width = gate.shape
    if rows:
        tensors = (grad, gate, up, of_gate, of_up)
        given = [each for tensor in tensors for each in (tensor, tensor.stride(0))]
        _gated_back[(rows, triton.cdiv(width, BLOCK))](*given, width, tanh=tanh, block=BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def _gated_back(  # type: ignore[no-untyped-def]  # noqa: PLR0913 - a kernel
    grad, grad_of_row, gate, gate_of_row, up, up_of_row, of_gate, of_gate_of_row, of_up, of_up_of_row,
    width, tanh: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * block + tl.arange(0, block)
    inside = place < width
    back = tl.load(grad + row * grad_of_row + place, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_of_row + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_of_row + place, mask=inside, other=0.0).to(tl.float32)
    sigmoid, slope = _sigmoid_and_slope(g, tanh)
    slope = sigmoid * (1 + g * (1 - sigmoid) * slope)
    to_gate = (back * u * slope).to(of_gate.dtype.element_ty)
    tl.store(of_gate + row * of_gate_of_row + place, to_gate, mask=inside)
    tl.store(of_up + row * of_up_of_row + place, (back * g * sigmoid).to(of_up.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _sigmoid_and_slope(g, tanh: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return what g is multiplied by, the sigmoid of a polynomial of g, and the slope of the polynomial. That
    of SiLU is g itself. GELU by tanh has (1 + tanh y) / 2, which is the sigmoid of 2 y."""
    if tanh:
        inner = 1.5957691216057308 * g * (1 + 0.044715 * g * g)  # 2 sqrt(2 / pi)
        slope = 1.5957691216057308 * (1 + 0.134145 * g * g)
    else:
        inner = g
        slope = tl.full(g.shape, 1.0, tl.float32)
    return tl.sigmoid(inner), slope


def rotated(heads: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    """functions.rotated's result of heads [T, heads, d]; with `back`, the gradient of its argument."""
    tokens, count, width = heads.shape
    out = torch.empty((tokens, count, width), dtype=heads.dtype, device=heads.device)
    if tokens:
        half = cos.shape[-1] // 2
        tail = width - 2 * half
        rows = min(32, int(triton.next_power_of_2(count)))
        _rotated[(tokens, triton.cdiv(count, rows))](
            heads,
            heads.stride(0),
            heads.stride(1),
            cos,
            cos.stride(0),
            sin,
            sin.stride(0),
            out,
            count,
            back=back,
            half=half,
            tail=tail,
            row=triton.next_power_of_2(half),
            tail_row=triton.next_power_of_2(max(1, tail)),
            rows=rows,
        )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _rotated(  # type: ignore[no-untyped-def]  # noqa: PLR0913 - a kernel
    heads, heads_of_token, heads_of_head, cos, cos_of_token, sin, sin_of_token, out, count,
    back: tl.constexpr, half: tl.constexpr, tail: tl.constexpr,
    row: tl.constexpr, tail_row: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    # in int64, since heads may lie behind each other, each with all tokens
    head = (tl.program_id(1) * rows + tl.arange(0, rows)[:, None]).to(tl.int64)
    place = tl.arange(0, row)[None]
    inside = place < half
    c = tl.load(cos + token * cos_of_token + place, mask=inside, other=0.0).to(tl.float32)
    c_second = tl.load(cos + token * cos_of_token + place + half, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + token * sin_of_token + place, mask=inside, other=0.0).to(tl.float32)
    s_second = tl.load(sin + token * sin_of_token + place + half, mask=inside, other=0.0).to(tl.float32)
    at = heads + token * heads_of_token + head * heads_of_head
    to = out + (token * count + head) * (2 * half + tail)
    here = (head < count) & inside
    first = tl.load(at + place, mask=here, other=0.0).to(tl.float32)
    second = tl.load(at + place + half, mask=here, other=0.0).to(tl.float32)
    if back:
        turned = first * c + second * s_second
        turned_second = second * c_second - first * s
    else:
        turned = first * c - second * s
        turned_second = second * c_second + first * s_second
    tl.store(to + place, turned.to(out.dtype.element_ty), mask=here)
    tl.store(to + place + half, turned_second.to(out.dtype.element_ty), mask=here)
    if tail > 0:
        behind = 2 * half + tl.arange(0, tail_row)[None]
        here_behind = (head < count) & (behind < 2 * half + tail)
        tl.store(to + behind, tl.load(at + behind, mask=here_behind, other=0.0), mask=here_behind)
