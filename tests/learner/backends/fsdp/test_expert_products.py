"""Products of the tokens of all experts by their weights, as FSDP's adapters of experts compute them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from learner.backends.fsdp import expert_adapters
from learner.backends.fsdp.expert_adapters import grouped_linear

COUNTS = torch.tensor([3, 0, 4, 0])


class Unwritten(torch.autograd.Function):
    """The kernel, which leaves in gradients of groups without tokens what was in memory before."""

    @staticmethod
    def forward(ctx, tokens: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weights, ends)
        return per_expert(tokens, weights.transpose(1, 2), ends.diff(prepend=ends.new_zeros(1)))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        tokens, weights, ends = ctx.saved_tensors
        counts = ends.diff(prepend=ends.new_zeros(1))
        pairs = zip(tokens.split(counts.tolist()), grad.split(counts.tolist()), strict=True)
        of_weights = torch.stack([inputs.t() @ outputs for inputs, outputs in pairs])
        of_weights[counts == 0] = torch.nan
        return per_expert(grad, weights, counts), of_weights, None


def per_expert(tokens: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Return the tokens of each expert times its weight [out, in]."""
    parts = zip(tokens.split(counts.tolist()), weights, strict=True)
    return torch.cat([F.linear(part, weight) for part, weight in parts])


def test_an_expert_without_tokens_has_a_gradient_of_0_whatever_the_kernel_leaves_there(monkeypatch):
    torch.manual_seed(0)
    tokens, weight = torch.randn(7, 8), torch.randn(4, 16, 8, requires_grad=True)
    expected = per_expert(tokens, weight, COUNTS)
    [wanted] = torch.autograd.grad(expected.square().sum(), [weight])
    monkeypatch.setattr(expert_adapters, "has_kernel", lambda _: True)
    monkeypatch.setattr(
        F, "grouped_mm", lambda tokens, weights, *, offs: Unwritten.apply(tokens, weights, offs)
    )
    found = grouped_linear(tokens, weight, COUNTS)
    found.square().sum().backward()
    assert torch.allclose(found, expected, atol=1e-6)
    assert torch.allclose(weight.grad, wanted, atol=1e-5)
