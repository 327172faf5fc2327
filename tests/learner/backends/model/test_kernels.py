"""The kernels against the same formulas in plain torch, in float32."""

import pytest
import torch

from learner.backends.megatron.model.output_layer import _logits_gradient, _softmax_sums, _statistics
from learner.backends.megatron.model.qkv import _join, _split

pytestmark = pytest.mark.gpu
ROWS, VOCAB = 37, 20_011
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Without CUDA, triton's interpreter runs the kernels: TRITON_INTERPRET=1 pytest -m gpu."""


@pytest.fixture
def kernels():
    return pytest.importorskip("learner.backends.megatron.model.kernels")


def test_sums_of_a_softmax(kernels):
    logits, scale = 5 * torch.randn(ROWS, VOCAB, device=DEVICE), torch.rand(ROWS, device=DEVICE) + 0.5
    for ours, plain in zip(
        kernels.softmax_sums(logits, scale), _softmax_sums(logits.cpu(), scale.cpu()), strict=True
    ):
        assert torch.allclose(ours.cpu(), plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradient_of_the_logits(kernels, with_entropy):
    logits, scale = 5 * torch.randn(ROWS, VOCAB), torch.rand(ROWS) + 0.5
    column = torch.randint(VOCAB, (ROWS, 1))
    here = torch.rand(ROWS, 1) < 0.8
    found = _statistics(logits, column, here, scale, None)
    slopes = torch.randn(ROWS), torch.randn(ROWS) if with_entropy else None
    expected = _logits_gradient(logits, column, here, found, *slopes, scale)
    label = torch.where(here, column, -1)[:, 0]
    entropy_slope = None if slopes[1] is None else (slopes[1] * scale).to(DEVICE)
    ours = kernels.logits_gradient(
        logits.to(DEVICE), label.to(DEVICE), found.log_total.to(DEVICE), found.entropy.to(DEVICE),
        (slopes[0] * scale).to(DEVICE), entropy_slope, scale.to(DEVICE),
    )  # fmt: skip
    assert torch.allclose(ours.cpu(), expected, atol=1e-6)


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
