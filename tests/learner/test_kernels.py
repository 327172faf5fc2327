"""The kernels against the same formulas in plain torch, in float32."""

import pytest
import torch

from learner.attention import _Rotate
from learner.head import _logits_gradient, _softmax_sums

pytestmark = pytest.mark.gpu
ROWS, VOCAB = 37, 20_011


@pytest.fixture
def kernels():
    return pytest.importorskip("learner.kernels")


def test_sums_of_a_softmax(kernels):
    logits = 5 * torch.randn(ROWS, VOCAB, device="cuda")
    for ours, plain in zip(kernels.softmax_sums(logits, 0.7), _softmax_sums(logits.cpu(), 0.7), strict=True):
        assert torch.allclose(ours.cpu(), plain, rtol=1e-5, atol=1e-5)


def test_gradient_of_the_logits(kernels):
    logits = 5 * torch.randn(ROWS, VOCAB, device="cuda")
    column = torch.randint(VOCAB, (ROWS, 1), device="cuda")
    here = torch.rand(ROWS, 1, device="cuda") < 0.8
    log_total, slope = (0.7 * logits).logsumexp(-1), torch.randn(ROWS, device="cuda")
    arguments = [x.cpu() for x in (logits, column, here, log_total, slope)]
    assert torch.allclose(
        _logits_gradient(logits, column, here, log_total, slope, 0.7).cpu(),
        _logits_gradient(*arguments, 0.7),
        atol=1e-6,
    )


@pytest.mark.parametrize(("heads", "width"), [(16, 128), (3, 24)])
def test_rotation_and_its_gradient(kernels, heads, width):
    packed = torch.randn(50, heads, 2 * width, device="cuda")
    x = packed[..., width:].requires_grad_()  # not contiguous, as Megatron-core's keys are
    angles = torch.rand(50, 1, width // 2, device="cuda")
    cos, sin = (torch.cat(parts, -1) for parts in ([angles.cos()] * 2, [-angles.sin(), angles.sin()]))
    weights = torch.randn(50, heads, width, device="cuda")
    rotated = _Rotate.apply(x, cos, sin)
    [gradient] = torch.autograd.grad((rotated * weights).sum(), x)
    plain = x.detach().cpu().requires_grad_()
    expected = _Rotate.apply(plain, cos.cpu(), sin.cpu())
    [expected_gradient] = torch.autograd.grad((expected * weights.cpu()).sum(), plain)
    assert torch.allclose(rotated.cpu(), expected, atol=1e-6)
    assert torch.allclose(gradient.cpu(), expected_gradient, atol=1e-6)


def test_gradient_of_swiglu(kernels):
    both = torch.randn(ROWS, 1, 2 * 1500, device="cuda").requires_grad_()
    gate, up = both.chunk(2, -1)
    result = torch.nn.functional.silu(gate) * up
    grad = torch.randn_like(result)
    [expected] = torch.autograd.grad(result, both, grad)
    assert torch.allclose(kernels.swiglu_back(grad, both.detach()), expected, atol=1e-5)
