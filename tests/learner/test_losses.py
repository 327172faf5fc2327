from math import inf, log

import pytest
import torch

from learner.losses.ppo_clip import ppo_clip_loss
from learner.losses.sft import sft_loss
from learner.losses.tis import tis_loss

ALL = torch.ones(3, dtype=torch.bool)


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, requires_grad=True)


def test_tis_by_hand():
    # ratios 1/2, 1 and 3, the last truncated to 2
    logprobs = leaf(log(0.2), log(0.5), log(0.9))
    behaviour = torch.tensor([log(0.4), log(0.5), log(0.3)])
    advantages = torch.tensor([1.0, -2.0, 3.0])
    loss, sums = tis_loss(logprobs, behaviour, advantages, ALL, truncation_cap=2.0)
    assert loss.item() == pytest.approx(-0.5 * log(0.2) + 2 * log(0.5) - 6 * log(0.9), rel=1e-5)
    loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([-0.5, 2.0, -6.0], rel=1e-5)
    assert sums["clipped_tokens"] == 1


def test_tis_on_policy_has_the_gradient_of_reinforce():
    logprobs = leaf(-1.0, -2.0, -0.1)
    advantages = torch.tensor([0.5, -1.5, 2.0])
    loss, _ = tis_loss(logprobs, logprobs.detach(), advantages, ALL, truncation_cap=2.0)
    loss.backward()
    assert logprobs.grad.tolist() == [-0.5, 1.5, -2.0]


def test_ppo_on_policy_has_the_gradient_of_reinforce():
    logprobs = leaf(-1.0, -2.0, -0.1)
    advantages = torch.tensor([0.5, -1.5, 2.0])
    loss, sums = ppo_clip_loss(logprobs, logprobs.detach(), advantages, ALL, clip_eps=0.2, clip_eps_high=0.2)
    loss.backward()
    assert logprobs.grad.tolist() == [-0.5, 1.5, -2.0]
    assert sums["clipped_tokens"] == 0


def test_ppo_clip_by_hand():
    # ratios 2, 2, 1/2, 1/2 with advantages of both signs: only the first and the last are clipped
    logprobs = leaf(log(0.4), log(0.4), log(0.1), log(0.1))
    behaviour = torch.full((4,), log(0.2))
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    mask = torch.ones(4, dtype=torch.bool)
    loss, sums = ppo_clip_loss(logprobs, behaviour, advantages, mask, clip_eps=0.2, clip_eps_high=0.3)
    assert loss.item() == pytest.approx(-1.3 + 2.0 - 0.5 + 0.8, rel=1e-5)
    loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([0.0, 2.0, -0.5, 0.0], rel=1e-5)
    assert sums["clipped_tokens"] == 2


def test_decoupled_ppo_weighs_by_the_truncated_ratio_of_proximal_to_behaviour():
    logprobs = leaf(log(0.3))
    loss, _ = ppo_clip_loss(
        logprobs,
        torch.tensor([log(0.1)]),
        torch.tensor([1.0]),
        torch.tensor([True]),
        clip_eps=0.2,
        clip_eps_high=0.2,
        truncation_cap=2.0,
        proximal_logprobs=torch.tensor([log(0.3)]),
    )
    assert loss.item() == pytest.approx(-2.0, rel=1e-5)
    loss.backward()
    assert logprobs.grad.item() == pytest.approx(-2.0, rel=1e-5)


def test_sft_is_the_negative_log_likelihood_under_the_mask():
    logprobs = leaf(-1.0, -2.0, -4.0)
    loss, _ = sft_loss(logprobs, torch.tensor([True, False, True]))
    loss.backward()
    assert loss.item() == 5.0
    assert logprobs.grad.tolist() == [-1.0, 0.0, -1.0]


@pytest.mark.parametrize("bad", [float("nan"), inf, -inf])
def test_masked_positions_may_hold_anything(bad):
    mask = torch.tensor([True, False])
    behaviour = torch.tensor([-1.0, bad])
    advantages = torch.tensor([1.0, bad])
    for loss_function in (
        lambda x: tis_loss(x, behaviour, advantages, mask, truncation_cap=2.0),
        lambda x: ppo_clip_loss(
            x, behaviour, advantages, mask, clip_eps=0.2, clip_eps_high=0.2, truncation_cap=2.0
        ),
    ):
        logprobs = leaf(-1.0, 0.0)
        loss, _ = loss_function(logprobs)
        loss.backward()
        assert loss.isfinite()
        assert logprobs.grad.tolist() == [-1.0, 0.0]
