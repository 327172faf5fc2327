"""The kernels for CUDA that torch.compile writes at half the speed of memory or less. Imported only there.

Each computes in float32 and rounds once, to the dtype of its input."""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 264
"""Programs that share a sum over tokens: two for each multiprocessor of an H200, where more were slower."""


def split_heads(
    heads: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """learner.heads' queries and keys, of contiguous `heads`."""
    tokens, groups, each, width = heads.shape
    query = torch.empty(tokens, groups * (each - 2), width, dtype=heads.dtype, device=heads.device)
    key = torch.empty(tokens, groups, width, dtype=heads.dtype, device=heads.device)
    slots, rows, half = groups * each, _rows(groups * each), width // 2
    _split_heads[(tokens, triton.cdiv(slots, rows))](
        heads,
        query_weight,
        key_weight,
        cos,
        sin,
        query,
        key,
        eps,
        slots=slots,
        each=each,
        normed=query_weight is not None,
        half=half,
        row=triton.next_power_of_2(half),
        rows=rows,
    )
    return query, key


@triton.jit  # type: ignore[untyped-decorator]
def _split_heads(  # type: ignore[no-untyped-def]  # noqa: PLR0913 - a kernel
    heads, query_weight, key_weight, cos, sin, query, key, eps,
    slots: tl.constexpr, each: tl.constexpr, normed: tl.constexpr,
    half: tl.constexpr, row: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot, place = tl.program_id(1) * rows + tl.arange(0, rows)[:, None], tl.arange(0, row)[None]
    group, nth = slot // each, slot % each
    is_query, is_key = (slot < slots) & (nth < each - 2), (slot < slots) & (nth == each - 2)
    inside = place < half
    at = heads + (token * slots + slot) * 2 * half + place
    first = tl.load(at, mask=(is_query | is_key) & inside, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=(is_query | is_key) & inside, other=0.0).to(tl.float32)
    if normed:
        scale = tl.rsqrt(tl.sum(first * first + second * second, 1)[:, None] / (2 * half) + eps)
        first *= scale * _weight(query_weight, key_weight, is_query, is_key, place, inside)
        second *= scale * _weight(query_weight, key_weight, is_query, is_key, place + half, inside)
    angle = token * 2 * half + place
    c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + angle + half, mask=inside, other=0.0).to(tl.float32)
    turned = (first * c - second * s).to(query.dtype.element_ty)
    turned_second = (second * c + first * s).to(query.dtype.element_ty)
    groups: tl.constexpr = slots // each
    to_query = query + (token * groups * (each - 2) + group * (each - 2) + nth) * 2 * half + place
    to_key = key + (token * groups + group) * 2 * half + place
    tl.store(to_query, turned, mask=is_query & inside)
    tl.store(to_query + half, turned_second, mask=is_query & inside)
    tl.store(to_key, turned, mask=is_key & inside)
    tl.store(to_key + half, turned_second, mask=is_key & inside)


def join_heads(
    heads: Tensor, query_weight: Tensor | None, key_weight: Tensor | None, cos: Tensor, sin: Tensor,
    eps: float, *grads: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """learner.heads' gradients of `heads`, in its form, and of the weights."""
    tokens, groups, each, width = heads.shape
    joined = torch.empty_like(heads)
    slots, rows, half = groups * each, _rows(groups * each), width // 2
    programs = min(tokens, PROGRAMS)
    normed = query_weight is not None
    partial = torch.empty((programs, groups, each, width) if normed else 0, device=heads.device)
    grads = tuple(grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
    _join_heads[(programs, triton.cdiv(slots, rows))](
        heads,
        query_weight,
        key_weight,
        cos,
        sin,
        *(x for grad in grads for x in (grad, grad.stride(0), grad.stride(1))),
        joined,
        partial,
        tokens,
        eps,
        slots=slots,
        each=each,
        normed=normed,
        half=half,
        row=triton.next_power_of_2(half),
        rows=rows,
        num_warps=8,
    )
    if query_weight is None:
        return joined, None, None
    slopes = partial.sum((0, 1))
    return joined, slopes[:-2].sum(0).to(query_weight.dtype), slopes[-2].to(query_weight.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _join_heads(  # type: ignore[no-untyped-def]  # noqa: PLR0913 - a kernel
    heads, query_weight, key_weight, cos, sin,
    query, query_of_token, query_of_head, key, key_of_token, key_of_head,
    value, value_of_token, value_of_head,
    joined, partial, tokens, eps,
    slots: tl.constexpr, each: tl.constexpr, normed: tl.constexpr,
    half: tl.constexpr, row: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    slot, place = tl.program_id(1) * rows + tl.arange(0, rows)[:, None], tl.arange(0, row)[None]
    group, nth = slot // each, slot % each
    is_query, is_key = (slot < slots) & (nth < each - 2), (slot < slots) & (nth == each - 2)
    is_value, inside = (slot < slots) & (nth == each - 1), place < half
    if normed:
        weight = _weight(query_weight, key_weight, is_query, is_key, place, inside)
        weight_second = _weight(query_weight, key_weight, is_query, is_key, place + half, inside)
        slope = tl.zeros((rows, row), tl.float32)
        slope_second = tl.zeros((rows, row), tl.float32)
    program = tl.program_id(0).to(tl.int64)
    for begin in range(0, tokens - tl.program_id(0), tl.num_programs(0)):
        token = program + begin
        of_query = query + token * query_of_token + (group * (each - 2) + nth) * query_of_head + place
        of_key = key + token * key_of_token + group * key_of_head + place
        of_value = value + token * value_of_token + group * value_of_head + place
        first = _one_of(of_query, of_key, of_value, is_query & inside, is_key & inside, is_value & inside)
        of_query, of_key, of_value = of_query + half, of_key + half, of_value + half
        second = _one_of(of_query, of_key, of_value, is_query & inside, is_key & inside, is_value & inside)
        angle = token * 2 * half + place
        c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + angle + half, mask=inside, other=0.0).to(tl.float32)
        back = first * c + second * s
        back_second = second * c - first * s
        at = (token * slots + slot) * 2 * half + place
        if normed:
            x = tl.load(heads + at, mask=(is_query | is_key) & inside, other=0.0).to(tl.float32)
            x_second = tl.load(heads + at + half, mask=(is_query | is_key) & inside, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(x * x + x_second * x_second, 1)[:, None] / (2 * half) + eps)
            x *= scale
            x_second *= scale
            slope += back * x
            slope_second += back_second * x_second
            back *= weight
            back_second *= weight_second
            mean = tl.sum(back * x + back_second * x_second, 1)[:, None] / (2 * half)
            back = (back - x * mean) * scale
            back_second = (back_second - x_second * mean) * scale
        result = tl.where(is_value, first, back).to(joined.dtype.element_ty)
        result_second = tl.where(is_value, second, back_second).to(joined.dtype.element_ty)
        tl.store(joined + at, result, mask=(slot < slots) & inside)
        tl.store(joined + at + half, result_second, mask=(slot < slots) & inside)
    if normed:
        to = partial + (program * slots + slot) * 2 * half + place
        tl.store(to, slope, mask=(slot < slots) & inside)
        tl.store(to + half, slope_second, mask=(slot < slots) & inside)


@triton.jit
def _weight(query_weight, key_weight, is_query, is_key, place, inside):  # type: ignore[no-untyped-def]
    """Return the weight of each row's norm, float32; that of values is 0."""
    of_query = tl.load(query_weight + place, mask=inside, other=0.0).to(tl.float32)
    of_key = tl.load(key_weight + place, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_query, of_query, tl.where(is_key, of_key, 0.0))


@triton.jit
def _one_of(query, key, value, is_query, is_key, is_value):  # type: ignore[no-untyped-def]
    """Read each row from the tensor that it lies in, as float32."""
    of_query = tl.load(query, mask=is_query, other=0.0).to(tl.float32)
    of_key = tl.load(key, mask=is_key, other=0.0).to(tl.float32)
    return of_query + of_key + tl.load(value, mask=is_value, other=0.0).to(tl.float32)


def _rows(slots: int) -> int:
    """Heads that a program takes at a time: 32 of width 128 fit the registers."""
    return min(32, int(triton.next_power_of_2(slots)))


def swiglu_back(grad: Tensor, gate_and_up: Tensor) -> Tensor:
    """Gradient [..., 2 F] of silu(gate) * up, from that of the result and from both halves [..., 2 F].

    Megatron-core calls it inside functions that torch compiles, which with the kernel for rows that lie apart
    (learner/backends/fused/kernels.py) failed at times: that one writes into two views of one tensor."""
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
