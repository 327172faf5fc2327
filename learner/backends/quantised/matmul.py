"""Linear layers that multiply in fp8: inputs, weights and gradients of outputs are codes with a scale a row.

Three products make a linear layer's step (arXiv:2209.05433). Those of the forward pass and of the gradient of
inputs are in fp8 here, e4m3 with float32 scales of the moment, and added up in float32. That of the gradient
of weights is in the model's type, with its sum in float32, as without fp8."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bus.errors import ConfigError
from storage.weights.fp8 import LARGEST, SMALLEST_SCALE

CODES = torch.float8_e4m3fn
NEEDED_CAPABILITY = (9, 0)
"""Compute capability of the first GPUs whose products in fp8 take a scale for each row."""
MULTIPLE = 16
"""Rows and columns of a weight must be multiples of it."""


def row_codes(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of a matrix and the float32 scales of its rows, [rows, 1]."""
    wide = values.float()
    largest = wide.abs().amax(1, keepdim=True)
    scales = torch.clamp(largest / LARGEST, min=float(SMALLEST_SCALE))
    return (wide / scales).clamp(-LARGEST, LARGEST).to(CODES), scales


@cache
def _compiled_row_codes() -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return `row_codes` for CUDA: without it, torch's compiler need not be loaded, which takes a second."""
    return torch.compile(row_codes, dynamic=True)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right.T, [M, N], in the type of `left`, of [M, K] and [N, K] as codes."""
    if not (left.is_cuda and _gpu_multiplies()):  # the same numbers, at the speed of float32
        (codes, scales), (others, other_scales) = row_codes(left), row_codes(right)
        return ((codes.float() @ others.float().t()) * scales * other_scales.t()).to(left.dtype)
    if not len(left):
        return left.new_empty(0, len(right))
    compiled = _compiled_row_codes()
    (codes, scales), (others, other_scales) = compiled(left), compiled(right)
    return torch._scaled_mm(
        codes,
        others.t(),
        scale_a=scales,
        scale_b=other_scales.t(),
        out_dtype=left.dtype,
        use_fast_accum=False,
    )


def _gpu_multiplies() -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability() >= NEEDED_CAPABILITY


def refuse_gpu(setting: str) -> None:
    """Raise `ConfigError` where this process's device has no products in fp8; `setting` asked for them."""
    found = "no GPU that torch can use"
    if torch.cuda.is_available():
        if _gpu_multiplies():
            return
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        found = f"{torch.cuda.get_device_name()}, of compute capability {capability}"
    needed = ".".join(map(str, NEEDED_CAPABILITY))
    raise ConfigError(
        f"{setting} needs GPUs of compute capability {needed} or more, as H100, and this learner has "
        f"{found}: leave it out"
    )


def refuse_sizes(name: str, weight: Tensor) -> None:
    """Raise `ConfigError` for a layer whose weight cannot be multiplied in fp8."""
    if any(size % MULTIPLE for size in weight.shape):
        raise ConfigError(
            f"learner.fp8_matmul=true cannot multiply with {name}, which is {list(weight.shape)} on each "
            f"rank: multiples of {MULTIPLE} can be; set it to false, or use fewer ranks of "
            "learner.parallel.tensor"
        )


class Fp8Linear(torch.autograd.Function):
    """Computes inputs @ weight.T as `product` does."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, accumulate: Any) -> Tensor:
        """Multiply [..., K] with [N, K].

        With `accumulate`, the gradient of the weight is what that returns of (weight, inputs, gradient of
        outputs), both [T, ...]."""
        ctx.save_for_backward(inputs, weight)
        ctx.accumulate = accumulate
        return product(inputs.flatten(0, -2), weight).view(*inputs.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Return the gradients of inputs and weight."""
        inputs, weight = ctx.saved_tensors
        gradient = gradients[0].flatten(0, -2)
        of_inputs = of_weight = None
        if ctx.needs_input_grad[0]:
            of_inputs = product(gradient, weight.t().contiguous()).view(inputs.shape)
        if ctx.needs_input_grad[1]:
            flat = inputs.flatten(0, -2)
            of_weight = ctx.accumulate(weight, flat, gradient) if ctx.accumulate else gradient.t() @ flat
        return of_inputs, of_weight, None
