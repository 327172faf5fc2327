"""Functions of a model whose values are those of a server with `rl_on_policy_target="fsdp"`, to the bit.

Gradients are those of torch's own functions at the same inputs."""

from typing import Any

import torch
from torch import Tensor

from learner.backends.sglang_kernels.kernels import SglangKernels
from storage.exact_arithmetic.functions import with_gradient


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: SglangKernels, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return kernels.matmul(x.flatten(0, -2), weight.t()).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        _, of_x, of_weight = ctx.needs_input_grad
        return (
            None,
            grad @ weight if of_x else None,
            grad.flatten(0, -2).t() @ x.flatten(0, -2) if of_weight else None,
        )


def linear(kernels: SglangKernels, x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.t() of bfloat16 [..., K] and [N, K]."""
    found: Tensor = _Linear.apply(kernels, x.contiguous(), weight)  # type: ignore[no-untyped-call]
    return found


def normed(kernels: SglangKernels, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight in float32; the first factor is rounded to the dtype of x."""
    wide = x.float()
    squares = wide.pow(2)
    variance = with_gradient(kernels.mean, lambda given: given.mean(-1, keepdim=True), squares)
    return weight.float() * (wide * torch.rsqrt(variance + eps)).to(x.dtype)


def rotary_angles(base: float, width: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, float32 [T, 1, width / 2] each; frequencies are computed on the host."""
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width
    frequencies = (1.0 / base**exponents).to(positions.device)
    angles = positions.float()[:, None] * frequencies
    return angles.cos()[:, None], angles.sin()[:, None]


def rotated(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the halves of float32 [T, heads, d] by the angles of their positions."""
    cos, sin = angles
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def logprobs_and_entropy(
    kernels: SglangKernels, logits: Tensor, labels: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the log-probs of labels and the entropies, float32 [n], of bfloat16 logits [n, V]."""
    of_all = kernels.log_softmax(logits.float() * scale[:, None])
    entropy = -torch.linalg.vecdot(of_all.exp(), of_all)  # entropy is only shown
    return of_all.gather(-1, labels[:, None])[:, 0], entropy
