"""The critic's loss by hand, its gradient, and what it makes of numbers at the edge of float32."""

import numpy as np
import pytest
import torch

from learner.algorithms.losses.clipped import value_loss


def test_half_the_squared_error_or_that_of_the_value_near_the_old_one():
    values = torch.tensor([1.0, 2.0, -3.0, 0.5], requires_grad=True)
    old = torch.tensor([1.0, 0.0, 0.0, 0.0])
    targets = torch.tensor([3.0, 3.0, 1.0, 0.25])
    losses, found = value_loss(values, old, targets, value_clip=0.5)
    # the second has moved to 2 and counts as 0.5; the third has moved away; the fourth has passed its target
    assert losses.tolist() == [2.0, 3.125, 8.0, 0.03125]
    assert found["clipped"].tolist() == [False, True, False, False]
    losses.sum().backward()
    assert values.grad.tolist() == [-2.0, 0.0, -4.0, 0.25]


def test_without_a_clip_it_is_the_squared_error():
    draw = torch.Generator().manual_seed(0)
    values, old, targets = (torch.randn(50, generator=draw) for _ in range(3))
    losses, found = value_loss(values, old, targets, value_clip=float("inf"))
    expected = 0.5 * (values.double() - targets.double()) ** 2
    assert torch.equal(losses, expected)
    assert not found["clipped"].any()


def test_it_is_finite_for_any_float32():
    largest = float(np.finfo(np.float32).max)
    values = torch.tensor([largest, -largest, 0.0], requires_grad=True)
    losses, _ = value_loss(values, torch.zeros(3), torch.tensor([-largest, largest, largest]), value_clip=0.2)
    assert torch.isfinite(losses).all()


def test_its_gradient_is_that_of_finite_differences():
    draw = torch.Generator().manual_seed(1)
    values, old, targets = (torch.randn(20, generator=draw, dtype=torch.float64) for _ in range(3))
    values.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, targets, value_clip=0.3)[0], values)


@pytest.mark.parametrize("value_clip", [0.2, float("inf")])
def test_the_first_update_on_a_batch_is_not_clipped(value_clip):
    values = torch.linspace(-2, 2, 9, requires_grad=True)
    losses, found = value_loss(values, values.detach(), torch.ones(9), value_clip=value_clip)
    losses.sum().backward()
    assert torch.equal(values.grad, values.detach() - 1)
    assert not found["clipped"].any()
