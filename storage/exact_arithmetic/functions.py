"""Functions of torch in exact arithmetic. Their values are exact, their gradients those of torch's own."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from storage.exact_arithmetic import attention, elementary, sums
from storage.exact_arithmetic.sums import IntegerWeight

Ordinary = Callable[..., Tensor | tuple[Tensor, ...]]


class _Depth(threading.local):
    """Counts the functions of this module that a thread is in."""

    now = 0


_depth = _Depth()


@contextmanager
def exactly() -> Iterator[None]:
    """Mark what is computed inside as exact (`exact_model.py` looks for what is not)."""
    _depth.now += 1
    try:
        yield
    finally:
        _depth.now -= 1


def is_exact() -> bool:
    """Tell whether this thread is inside of `exactly`."""
    return _depth.now > 0


class _WithOrdinaryGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exact: Ordinary, ordinary: Ordinary, *given: Tensor) -> Tensor | tuple[Tensor, ...]:
        ctx.ordinary = ordinary
        ctx.save_for_backward(*given)
        return exact(*given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the ordinary function again, and take its gradients."""
        wanted = ctx.needs_input_grad[2:]
        leaves = [each.detach().requires_grad_(w) for each, w in zip(ctx.saved_tensors, wanted, strict=True)]
        with torch.enable_grad():
            found = ctx.ordinary(*leaves)
        outputs = found if isinstance(found, tuple) else (found,)
        needed = [leaf for leaf in leaves if leaf.requires_grad]
        of_needed = iter(torch.autograd.grad(outputs, needed, grads))
        return None, None, *(next(of_needed) if leaf.requires_grad else None for leaf in leaves)


def with_gradient(exact: Ordinary, ordinary: Ordinary, *given: Tensor) -> Any:
    """Return exact(*given), whose gradient is that of ordinary(*given)."""
    with exactly():
        if not (torch.is_grad_enabled() and any(each.requires_grad for each in given)):
            return exact(*given)
        return _WithOrdinaryGradient.apply(exact, ordinary, *given)  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return IntegerWeight(weight).product(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad
        return (
            grad @ weight if of_x else None,
            grad.flatten(0, -2).t() @ x.flatten(0, -2) if of_weight else None,
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.t() + bias of [..., K] and [N, K]."""
    with exactly():
        found: Tensor = _Linear.apply(x, weight)  # type: ignore[no-untyped-call]
        return found if bias is None else found + bias


def mean(x: Tensor) -> Tensor:
    count = x.shape[-1]
    return with_gradient(  # type: ignore[no-any-return]
        lambda given: (sums.exact_sum(given) / count).float(), lambda given: given.mean(-1, keepdim=True), x
    )


def silu(x: Tensor) -> Tensor:
    return with_gradient(elementary.silu, F.silu, x)  # type: ignore[no-any-return]


def rsqrt(x: Tensor) -> Tensor:
    return with_gradient(elementary.reciprocal_sqrt, torch.rsqrt, x)  # type: ignore[no-any-return]


def cos_sin(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of angles, without gradient."""
    with exactly():
        return elementary.cos_sin(x)


def cos(x: Tensor) -> Tensor:
    return cos_sin(x)[0]


def sin(x: Tensor) -> Tensor:
    return cos_sin(x)[1]


def causal_attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> Tensor:
    """Attend to all tokens before: [B, heads, L, d] and twice [B, groups, L, d] to [B, heads, L, d]."""

    def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention.attend(query, key, value, scale=scale)

    def ordinary(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)

    return with_gradient(exact, ordinary, query, key, value)  # type: ignore[no-any-return]
