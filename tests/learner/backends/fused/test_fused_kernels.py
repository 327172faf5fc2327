"""The kernels against the same functions in plain torch."""

import pytest
import torch

from learner.backends.fused import functions
from learner.backends.fused.functions import ACTIVATIONS, gated, gated_halves, rms_norm, rotated

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Without CUDA, triton's interpreter runs the kernels: TRITON_INTERPRET=1 pytest -m gpu."""
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Part of the largest number by which results may differ."""


@pytest.fixture
def kernels(monkeypatch):
    kernels = pytest.importorskip("learner.backends.fused.kernels")
    monkeypatch.setattr(functions, "kernels", kernels, raising=False)
    monkeypatch.setattr(kernels, "PROGRAMS", 3)  # each takes several tiles
    return kernels


def assert_same(fused, plain, *given, dtype):
    """Compare results and gradients of a class of functions.py with those of float32 on the CPU."""
    here = [x.to(DEVICE, dtype).requires_grad_(x.requires_grad) if torch.is_tensor(x) else x for x in given]
    there = [x.detach().cpu().float() if torch.is_tensor(x) else x for x in here]
    for x, like in zip(there, given, strict=True):
        if torch.is_tensor(x):
            x.requires_grad_(like.requires_grad)
    found, expected = fused.apply(*here), plain(*there)
    grad = torch.randn(expected.shape).transpose(0, 1).contiguous().transpose(0, 1)  # not as it lies
    leaves = [x for x in here if torch.is_tensor(x) and x.requires_grad]
    others = [x for x in there if torch.is_tensor(x) and x.requires_grad]
    slopes = torch.autograd.grad(found, leaves, grad.to(DEVICE, dtype))
    expected_slopes = torch.autograd.grad(expected, others, grad.to(dtype).float())
    for ours, theirs in zip([found, *slopes], [expected, *expected_slopes], strict=True):
        assert ours.dtype == dtype
        assert ours.shape == theirs.shape
        assert (ours.cpu().float() - theirs).abs().max() < ROUNDING[dtype] * theirs.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("shape", [(1, 9, 4, 16), (1, 70, 24), (3, 2, 1024), (1, 3, 6000)])
def test_norms(kernels, shape, centred, dtype):
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(shape[-1], requires_grad=True)
    plain = lambda x, weight, eps, centred: rms_norm(x, weight, eps, centred=centred)  # noqa: E731
    assert_same(functions._RMSNorm, plain, x, weight, 1e-6, centred, dtype=dtype)


def test_a_norm_reads_rows_that_lie_apart_and_frozen_weights_have_no_gradient(kernels):
    both, weight = torch.randn(1, 7, 3, 32, device=DEVICE), torch.randn(16, device=DEVICE)
    x = both.chunk(2, -1)[0].requires_grad_()
    found = functions._RMSNorm.apply(x, weight, 1e-6, False)
    expected = rms_norm(x.detach().cpu(), weight.cpu(), 1e-6, centred=False)
    assert torch.allclose(found.detach().cpu(), expected, atol=1e-5)
    [slope] = torch.autograd.grad(found.square().sum(), x)
    # the norm of each result is fixed, but for eps
    assert (slope * x).sum(-1).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates(kernels, activation, dtype):
    gate, up = (2 * torch.randn(1, 11, 1500) for _ in range(2))
    given = gate.requires_grad_(), up.requires_grad_()
    assert_same(functions._Gated, gated, *given, activation, dtype=dtype)
    both = (2 * torch.randn(5, 48)).requires_grad_()
    assert_same(functions._GatedHalves, gated_halves, both, activation, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "width", "turned"), [(16, 128, 128), (3, 24, 8), (40, 24, 24), (1, 10, 6)])
def test_rotations(kernels, heads, width, turned, dtype):
    x = torch.randn(heads, 13, width).transpose(0, 1).requires_grad_()
    cos, sin = torch.randn(13, turned), torch.randn(13, turned)
    assert_same(functions._Rotated, rotated, x, cos, sin, dtype=dtype)


def test_heads_that_lie_a_billion_elements_apart_are_rotated(kernels):
    """Those of a pack of 256k tokens have their gradients so, with all tokens of a head before the next."""
    apart = 2**30 + 64
    memory = torch.empty(2 * apart + 16, dtype=torch.bfloat16, device=DEVICE)
    heads, x = memory.as_strided((1, 3, 16), (16, apart, 1)), torch.randn(1, 3, 16).bfloat16()
    heads.copy_(x)
    cos, sin = torch.randn(2, 1, 16)
    found = functions._Rotated.apply(heads, cos.to(DEVICE), sin.to(DEVICE))
    assert torch.allclose(found.cpu().float(), rotated(x.float(), cos, sin), rtol=1e-2, atol=1e-2)


def test_nothing_is_computed_of_no_tokens(kernels):
    x = torch.randn(0, 16, device=DEVICE, requires_grad=True)
    weight = torch.randn(16, device=DEVICE, requires_grad=True)
    found = functions._GatedHalves.apply(functions._RMSNorm.apply(x, weight, 1e-6, False), "silu")
    slopes = torch.autograd.grad(found.sum(), (x, weight))
    assert found.shape == (0, 8)
    assert slopes[0].shape == (0, 16)
    assert not slopes[1].any()
