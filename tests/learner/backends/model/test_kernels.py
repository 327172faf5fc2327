"""The kernels against the same formulas in plain torch, in float32."""

import pytest
import torch

from learner.backends.megatron.model.attention.qkv import _join, _split

pytestmark = pytest.mark.gpu
ROWS = 37
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Without CUDA, triton's interpreter runs the kernels: TRITON_INTERPRET=1 pytest -m gpu."""


@pytest.fixture
def kernels():
    return pytest.importorskip("learner.backends.megatron.core.kernels")


@pytest.mark.parametrize(
    ("groups", "each", "width", "normed"),
    [(8, 2, 128, True), (2, 3, 24, True), (8, 5, 64, True), (4, 1, 128, False)],
)
@pytest.mark.parametrize("tokens", [1, 50])
def test_heads_are_split_and_joined(kernels, monkeypatch, tokens, groups, each, width, normed):
    monkeypatch.setattr(kernels, "PROGRAMS", 8)  # each takes several tokens
    mixed = torch.randn(tokens, 1, groups * (each + 2) * width)
    weights = [torch.rand(width) + 0.5 if normed else None for _ in range(2)]
    angles = torch.rand(tokens, 1, width // 2)
    cos, sin = (torch.cat(parts, -1) for parts in ([angles.cos()] * 2, [-angles.sin(), angles.sin()]))
    # gradients need not be contiguous: attention gives them as it likes
    grads = [torch.randn(heads, tokens, width).transpose(0, 1) for heads in (groups * each, groups, groups)]
    arguments = [mixed.view(tokens, groups, each + 2, width), *weights, cos, sin, 1e-6]
    on_device = [x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in arguments]
    found = [
        *kernels.split_heads(*on_device),
        *kernels.join_heads(*on_device, *(x.to(DEVICE) for x in grads)),
    ]
    expected = [*_split(*arguments), *_join(*arguments, *grads)]
    for ours, plain in zip(found, expected, strict=True):
        assert (ours is None) == (plain is None)
        assert plain is None or torch.allclose(ours.cpu(), plain, atol=2e-5)


def test_gradient_of_swiglu(kernels):
    both = torch.randn(ROWS, 1, 2 * 1500, device=DEVICE).requires_grad_()
    gate, up = both.chunk(2, -1)
    result = torch.nn.functional.silu(gate) * up
    grad = torch.randn_like(result)
    [expected] = torch.autograd.grad(result, both, grad)
    assert torch.allclose(kernels.swiglu_back(grad, both.detach()), expected, atol=1e-5)
