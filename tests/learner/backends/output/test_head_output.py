"""The loss of a head, its gradient and its right guesses, in chunks, as autograd and argmax have them."""

import pytest
import torch
import torch.nn.functional as F

from learner.backends.output.head_output import head_loss


@pytest.mark.parametrize("chunk_size", [1, 3, 100])
def test_it_is_the_cross_entropy_of_the_rows_that_count(chunk_size):
    torch.manual_seed(0)
    hidden, weight = torch.randn(8, 6, requires_grad=True), torch.randn(11, 6)
    labels = (hidden @ weight.t()).argmax(-1)
    labels[::3] = torch.tensor([1, 2, 3])
    counted = torch.tensor([1, 1, 1, 0, 1, 0, 1, 1], dtype=torch.bool)
    logits = hidden @ weight.t()
    loss_weights = torch.tensor([1.0, 0.25, 1.75, torch.inf, 0.0, 1.0, 2.0, 1.0])
    losses = F.cross_entropy(logits[counted], labels[counted], reduction="none")
    expected = (loss_weights[counted] * losses).sum()
    expected.backward()
    found = head_loss(
        hidden.detach(), weight, torch.where(counted, labels, -1), counted, loss_weights,
        chunk_size=chunk_size,
    )  # fmt: skip
    torch.testing.assert_close(found.loss, expected.detach())
    torch.testing.assert_close(found.gradient, hidden.grad)
    assert found.correct == (logits.argmax(-1) == labels)[counted].sum() == 4


def test_no_rows_have_no_loss():
    found = head_loss(
        torch.zeros(0, 6), torch.ones(11, 6), torch.zeros(0, dtype=torch.int64),
        torch.zeros(0, dtype=torch.bool), torch.ones(0), chunk_size=4,
    )  # fmt: skip
    assert (found.gradient.shape, found.loss, found.correct) == ((0, 6), 0, 0)
