"""What stands between the matrix products of a layer, each in one kernel on CUDA.

Elsewhere torch computes the same, one operation at a time. Both do so in float32 and round once."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

if torch.cuda.is_available():  # triton comes with torch for CUDA only
    from learner.backends.fused import kernels

SILU, GELU_TANH = "silu", "gelu_tanh"
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    SILU: F.silu,
    GELU_TANH: partial(F.gelu, approximate="tanh"),
}
"""The activations of gates, by their names here."""
WIDEST_NORM = 16384
"""Elements of the longest rows that one program norms."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, centred: bool) -> Tensor:
    """Norm the last dimension (arXiv:1910.07467, eq. 4) and multiply by the weight. With `centred`, multiply
    by 1 + weight."""
    if x.is_cuda and len(weight) <= WIDEST_NORM:
        return _RMSNorm.apply(x, weight, eps, centred)  # type: ignore[no-any-return, no-untyped-call]
    wide, factors = x.float(), weight.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * (1 + factors if centred else factors)).to(x.dtype)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * up (arXiv:2002.05202, eq. 5 and 6); the gradient needs these two alone."""
    if gate.is_cuda:
        return _Gated.apply(gate, up, activation)  # type: ignore[no-any-return, no-untyped-call]
    return (ACTIVATIONS[activation](gate.float()) * up.float()).to(gate.dtype)


def gated_halves(gate_and_up: Tensor, activation: str) -> Tensor:
    """Return what `gated` does of the first and the second half of the last dimension."""
    if gate_and_up.is_cuda:
        return _GatedHalves.apply(gate_and_up, activation)  # type: ignore[no-any-return, no-untyped-call]
    gate, up = gate_and_up.chunk(2, -1)
    return gated(gate, up, activation)


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [T, heads, d] by angles [T, r], the first r of each head's d (arXiv:2104.09864, eq. 34). The
    i-th element makes a pair with the one r / 2 behind it."""
    if heads.is_cuda:
        return _Rotated.apply(heads, cos, sin)  # type: ignore[no-any-return, no-untyped-call]
    turning, rest = heads.float().tensor_split([cos.shape[-1]], -1)
    first, second = turning.chunk(2, -1)
    turned = turning * cos.float()[:, None] + torch.cat((-second, first), -1) * sin.float()[:, None]
    return torch.cat((turned, rest), -1).to(heads.dtype)


def _rows(x: Tensor) -> Tensor:
    """Return [..., width] as rows [N, width] that may lie apart, without a copy where that can be."""
    return _with_rows(x.reshape(-1, x.shape[-1]))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, centred: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.centred = eps, centred
        return kernels.rms_norm(_rows(x), weight, eps, centred=centred).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = kernels.rms_norm_back(
            _rows(grad), _rows(x), weight, ctx.eps, centred=ctx.centred, of_weight=ctx.needs_input_grad[1]
        )
        return of_x.view(x.shape), of_weight, None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.tanh = activation == GELU_TANH
        return kernels.gated(_rows(gate), _rows(up), tanh=ctx.tanh).view(gate.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        found = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in (gate, up)]
        kernels.gated_back(*(_rows(each) for each in (grad, gate, up, *found)), tanh=ctx.tanh)
        return *found, None


class _GatedHalves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate_and_up)
        ctx.tanh = activation == GELU_TANH
        gate, up = _rows(gate_and_up).chunk(2, -1)
        return kernels.gated(gate, up, tanh=ctx.tanh).view(*gate_and_up.shape[:-1], gate.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gate_and_up,) = ctx.saved_tensors
        rows = _rows(gate_and_up)
        found = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        kernels.gated_back(_rows(grad), *rows.chunk(2, -1), *found.chunk(2, -1), tanh=ctx.tanh)
        return found.view(gate_and_up.shape), None


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = _with_rows(cos), _with_rows(sin)
        ctx.save_for_backward(cos, sin)
        return kernels.rotated(_with_rows(heads), cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return kernels.rotated(_with_rows(grad), cos, sin, back=True), None, None


def _with_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
