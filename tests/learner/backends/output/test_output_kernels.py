"""The kernels of the output layer against the same formulas in plain torch, in float32."""

import pytest
import torch

from learner.backends.output.output_layer import _logits_gradient, _statistics, softmax_sums

pytestmark = pytest.mark.gpu
ROWS, VOCAB = 37, 20_011
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Without CUDA, triton's interpreter runs the kernels: TRITON_INTERPRET=1 pytest -m gpu."""


@pytest.fixture
def kernels():
    return pytest.importorskip("learner.backends.output.kernels")


def test_sums_of_a_softmax(kernels):
    logits, scale = 5 * torch.randn(ROWS, VOCAB, device=DEVICE), torch.rand(ROWS, device=DEVICE) + 0.5
    for ours, plain in zip(
        kernels.softmax_sums(logits, scale), softmax_sums(logits.cpu(), scale.cpu()), strict=True
    ):
        assert torch.allclose(ours.cpu(), plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradient_of_the_logits(kernels, with_entropy):
    logits, scale = 5 * torch.randn(ROWS, VOCAB), torch.rand(ROWS) + 0.5
    column = torch.randint(VOCAB, (ROWS, 1))
    here = torch.rand(ROWS, 1) < 0.8
    found = _statistics(logits, column, here, scale, None, None)
    slopes = torch.randn(ROWS), torch.randn(ROWS) if with_entropy else None
    expected = _logits_gradient(logits.clone(), column, here, found, *slopes, scale)
    label = torch.where(here, column, -1)[:, 0]
    entropy_slope = None if slopes[1] is None else (slopes[1] * scale).to(DEVICE)
    ours = kernels.logits_gradient(
        logits.to(DEVICE), label.to(DEVICE), found.log_total.to(DEVICE), found.entropy.to(DEVICE),
        (slopes[0] * scale).to(DEVICE), entropy_slope, scale.to(DEVICE),
    )  # fmt: skip
    assert torch.allclose(ours.cpu(), expected, atol=1e-6)
