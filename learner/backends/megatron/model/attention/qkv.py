"""Splits the output of the qkv projection into normed, rotated queries and keys, and values, in one pass."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

if torch.cuda.is_available():  # triton comes with torch for CUDA only
    from learner.backends.megatron.core import kernels


class HeadSettings(NamedTuple):
    """Sizes and constants of `split_heads`."""

    groups: int
    """Number of key-value heads."""
    width: int
    """Width of a head, d."""
    eps: float
    """Constant added under the root of the norm."""


def split_heads(
    mixed: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    rotation: Sequence[Tensor],
    settings: HeadSettings,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split into queries [T, heads, d], keys and values [T, groups, d]; the values may share memory with
    `mixed`.

    Args:
        mixed: [T, 1, groups * (heads / groups + 2) * d], each group's queries, its key and its value.
        query_weight: [d], weight of the root-mean-square norm of each query; `None` for families without.
        key_weight: [d], the same for keys.
        rotation: twice [T, 1, d], the cosine of the rotary angle of each token, the halves of d paired as in
            Llama, and its sine, negated in the first half of d.
        settings: sizes."""
    return _SplitHeads.apply(mixed, query_weight, key_weight, *rotation, settings)  # type: ignore[no-any-return, no-untyped-call]


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        settings: HeadSettings,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.settings, ctx.shape = settings, mixed.shape
        heads = heads_by_group(mixed, settings)
        forward = kernels.split_heads if mixed.is_cuda else _split
        query, key = forward(heads, query_weight, key_weight, cos, sin, settings.eps)
        # The gradient of no norms needs no heads, which would stay for the sake of the values alone.
        is_needed = mixed.is_cuda or query_weight is not None
        ctx.save_for_backward(mixed if is_needed else None, query_weight, key_weight, cos, sin)
        values = heads[:, :, -1]
        return query, key, values if is_needed else values.contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mixed, query_weight, key_weight, cos, sin = ctx.saved_tensors
        if mixed is None:
            mixed = grads[0].new_empty(ctx.shape)
        heads = heads_by_group(mixed, ctx.settings)
        backward = kernels.join_heads if mixed.is_cuda else _join
        grad, *of_weights = backward(heads, query_weight, key_weight, cos, sin, ctx.settings.eps, *grads)
        return grad.view(ctx.shape), *of_weights, None, None, None


def heads_by_group(mixed: Tensor, settings: HeadSettings) -> Tensor:
    """Return [T, groups, heads / groups + 2, d]: each group's queries, its key and its value."""
    return mixed.view(len(mixed), settings.groups, -1, settings.width)


def _split(
    heads: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> list[Tensor]:
    """Return queries and keys [T, heads, d] of `heads` [T, groups, heads / groups + 2, d]."""
    result = []
    for place, weight in queries_and_keys(heads, query_weight, key_weight):
        x = _wide(heads[:, :, place])
        if weight is not None:
            x = (x * _scale(x, eps)).mul_(_wide(weight))
        result.append(_rotated(x, cos, sin).flatten(1, 2).to(heads.dtype))
    return result


def _join(
    heads: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    *grads: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of `heads` and of the weights from those of queries, keys and values. With n = x *
    scale and g = grad * weight, d/dx = scale * (g - n * mean(g * n))."""
    joined = torch.empty_like(heads)
    joined[:, :, -1] = grads[2]
    of_weights: list[Tensor | None] = []
    parts = queries_and_keys(heads, query_weight, key_weight)
    for (place, weight), grad in zip(parts, grads[:2], strict=True):
        into = joined[:, :, place]
        grad = _rotated(_wide(grad.reshape(into.shape)), cos, -sin)
        if weight is None:
            into.copy_(grad)
            of_weights.append(None)
            continue
        x = _wide(heads[:, :, place])
        scale = _scale(x, eps)
        normed = x * scale
        scaled = grad * _wide(weight)
        mean = torch.linalg.vecdot(scaled, normed)[..., None] / x.shape[-1]
        into.copy_(torch.addcmul(scaled, normed, mean, value=-1).mul_(scale))
        of_weights.append(normed.mul_(grad).flatten(0, -2).sum(0).to(weight.dtype))
    return joined, of_weights[0], of_weights[1]


def queries_and_keys(
    heads: Tensor, query_weight: Tensor | None, key_weight: Tensor | None
) -> tuple[tuple[slice, Tensor | None], tuple[slice, Tensor | None]]:
    """Return the places of both among the heads of a group, and the weights of their norms."""
    queries = heads.shape[2] - 2
    return (slice(0, queries), query_weight), (slice(queries, queries + 1), key_weight)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _scale(x: Tensor, eps: float) -> Tensor:
    """Return one over the root of the mean square, [..., 1]."""
    mean_square: Tensor = torch.linalg.vecdot(x, x)[..., None] / x.shape[-1]
    return torch.rsqrt(mean_square + eps)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [T, groups, n, d] by the angles of each token; with -sin, back. The result is contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half = x.shape[-1] // 2
    cos, sin = cos[..., None, :half].to(x.dtype), sin[..., None, half:].to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out
