from math import inf, log

import pytest
import torch

from learner.algorithms.losses.kl import kl_estimates
from learner.algorithms.losses.ppo_clip import ppo_clip_loss
from learner.algorithms.losses.sft import sft_loss
from learner.algorithms.losses.tis import tis_loss

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


@pytest.mark.parametrize(
    ("estimator", "expected", "slope"),
    [
        ("k1", [log(2), -log(2), 12.0], [1.0, 1.0, 1.0]),
        ("k2", [log(2) ** 2 / 2, log(2) ** 2 / 2, 72.0], [log(2), -log(2), 12.0]),
        ("k3", [log(2) - 0.5, 1 - log(2), 11.0], [0.5, -1.0, 1.0]),
        ("low_var_kl", [log(2) - 0.5, 1 - log(2), 10.0], [0.5, -1.0, 0.0]),
    ],
)
def test_kl_estimators_by_hand(estimator, expected, slope):
    # twice, half and e^12 times as likely as under the reference
    logprobs = leaf(log(0.4), log(0.2), -1.0)
    reference = torch.tensor([log(0.2), log(0.4), -13.0])
    found = kl_estimates(logprobs, reference, ALL, estimator=estimator)
    assert found.tolist() == pytest.approx(expected, rel=1e-4)
    found.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx(slope, rel=1e-4, abs=1e-4)


def test_an_unbiased_estimate_is_weighed_before_it_is_cut_off():
    logprobs, reference = torch.tensor([0.0, 0.0]), torch.tensor([-20.0, -20.0])
    ratio = torch.tensor([0.25, 2.0])
    found = kl_estimates(logprobs, reference, ALL[:2], estimator="low_var_kl", importance_ratio=ratio)
    assert found.tolist() == [4.75, 10.0]


def test_the_mean_of_k1_and_of_k3_over_the_policy_is_the_divergence():
    policy, reference = (torch.randn(50, generator=torch.Generator().manual_seed(n)) for n in (0, 1))
    policy, reference = policy.double().log_softmax(-1), reference.double().log_softmax(-1)
    divergence = (policy.exp() * (policy - reference)).sum()
    for estimator in ("k1", "k3"):
        mask = torch.ones(50, dtype=torch.bool)
        estimates = kl_estimates(policy, reference, mask, estimator=estimator)
        assert (policy.exp() * estimates).sum().item() == pytest.approx(divergence.item(), rel=1e-9)


def test_a_masked_position_has_no_divergence_whatever_it_holds():
    logprobs = leaf(-1.0, 0.0)
    reference = torch.tensor([-2.0, float("nan")])
    ratio = torch.tensor([1.0, float("inf")])
    mask = torch.tensor([True, False])
    found = kl_estimates(logprobs, reference, mask, estimator="k3", importance_ratio=ratio)
    found.sum().backward()
    assert found[1] == 0
    assert logprobs.grad[1] == 0
    assert logprobs.grad.isfinite().all()
