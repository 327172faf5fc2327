"""Losses, corrections and penalties against numbers worked out by hand."""

from math import exp, inf, log

import pytest
import torch

from bus.errors import ConfigError
from learner.algorithms.losses.kl import kl_estimates
from learner.algorithms.losses.objective import Objective, token_losses
from learner.algorithms.plugin import load_plugin
from learner.config.correction import NoCorrection, PluginCorrection, TokenTIS
from learner.config.frozen_policies import ReferenceConfig
from learner.config.loss import GSPOLoss, PluginLoss, PPOClipLoss, ReinforceLoss, SFTLoss
from learner.config.plugin import Plugin
from tests.learner.algorithms.loss_inputs import leaf, tokens_of, worked_out
from tests.learner.tiny import TIS

HERE = "tests.learner.algorithms.test_losses"


def test_truncated_importance_sampling_by_hand():
    # ratios 1/2, 1 and 3, the last truncated to 2
    logprobs = leaf(log(0.2), log(0.5), log(0.9))
    behaviour = [log(0.4), log(0.5), log(0.3)]
    losses, gradient, sums = worked_out(
        TIS, tokens_of(logprobs, behaviour_logprobs=behaviour, advantages=[1.0, -2.0, 3.0])
    )
    assert losses == pytest.approx([-0.5 * log(0.2), 2 * log(0.5), -6 * log(0.9)], rel=1e-5)
    assert gradient == pytest.approx([-0.5, 2.0, -6.0], rel=1e-5)
    assert sums == {"truncated_tokens": 1}


@pytest.mark.parametrize("objective", [TIS, Objective(PPOClipLoss())])
def test_on_policy_the_gradient_is_that_of_reinforce(objective):
    logprobs = leaf(-1.0, -2.0, -0.1)
    tokens = tokens_of(logprobs, behaviour_logprobs=[-1.0, -2.0, -0.1], advantages=[0.5, -1.5, 2.0])
    _, gradient, sums = worked_out(objective, tokens)
    assert gradient == [-0.5, 1.5, -2.0]
    assert set(sums.values()) == {0}


def test_ppo_clip_by_hand():
    # ratios 2, 2, 1/2, 1/2 with advantages of both signs: only the first and the last are clipped
    logprobs = leaf(log(0.4), log(0.4), log(0.1), log(0.1))
    tokens = tokens_of(logprobs, behaviour_logprobs=log(0.2), advantages=[1.0, -1.0, 1.0, -1.0])
    objective = Objective(PPOClipLoss(clip_eps=0.2, clip_eps_high=0.3))
    losses, gradient, sums = worked_out(objective, tokens)
    assert losses == pytest.approx([-1.3, 2.0, -0.5, 0.8], rel=1e-5)
    assert gradient == pytest.approx([0.0, 2.0, -0.5, 0.0], rel=1e-5)
    assert sums == {"clipped_tokens": 2}


def test_decoupled_ppo_weighs_by_the_truncated_ratio_of_proximal_to_behaviour():
    tokens = tokens_of(
        leaf(log(0.3)), behaviour_logprobs=log(0.1), proximal_logprobs=log(0.3), advantages=1.0
    )
    for cap, weight in ((2.0, 2.0), (inf, 3.0)):
        objective = Objective(PPOClipLoss(centre="proximal"), TokenTIS(truncation_cap=cap))
        losses, gradient, sums = worked_out(objective, tokens)
        assert losses == pytest.approx([-weight], rel=1e-5)
        assert gradient == pytest.approx([-weight], rel=1e-5)
        assert sums["truncated_tokens"] == (cap == 2.0)


def test_gspo_by_hand():
    # sequence 0 has the mean log ratio log(2) / 2, so the ratio sqrt(2), clipped to 1.3; sequence 1 has 1/2
    logprobs = leaf(log(0.4), log(0.2), log(0.1))
    tokens = tokens_of(logprobs, sequence=(0, 0, 1), behaviour_logprobs=log(0.2), advantages=[1.0, 1.0, 1.0])
    objective = Objective(GSPOLoss(sequence_clip_eps=0.2, sequence_clip_eps_high=0.3))
    losses, gradient, sums = worked_out(objective, tokens)
    assert losses == pytest.approx([-1.3, -1.3, -0.5], rel=1e-5)
    assert gradient == pytest.approx([0.0, 0.0, -0.5], rel=1e-5)
    assert sums == {"clipped_tokens": 2}
    # without a clip, each of the two tokens carries sqrt(2) / 2 for each of the sequence's two losses
    _, gradient, _ = worked_out(
        Objective(GSPOLoss(sequence_clip_eps=0.9, sequence_clip_eps_high=9.0)), tokens
    )
    assert gradient == pytest.approx([-(2**0.5), -(2**0.5), -0.5], rel=1e-5)


def test_sft_is_the_negative_log_likelihood():
    losses, gradient, _ = worked_out(Objective(SFTLoss()), tokens_of(leaf(-1.0, -4.0)))
    assert (losses, gradient) == ([1.0, 4.0], [-1.0, -1.0])


@pytest.mark.parametrize("loss", [ReinforceLoss(), PPOClipLoss(), PPOClipLoss(centre="proximal"), GSPOLoss()])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_log_ratio_that_no_float_can_hold_leaves_the_gradient_finite(loss, advantage):
    tokens = tokens_of(
        leaf(-1.0), behaviour_logprobs=-400.0, proximal_logprobs=-300.0, reference_logprobs=-400.0,
        advantages=advantage,
    )  # fmt: skip
    correction = NoCorrection() if loss.type == "gspo" else TokenTIS()
    reference = ReferenceConfig(kl_coef=0.1, kl_estimator="low_var_kl", kl_unbiased=True)
    losses, gradient, _ = worked_out(Objective(loss, correction, reference=reference), tokens)
    assert torch.tensor([*losses, *gradient]).isfinite().all()


def test_the_entropy_bonus_rewards_entropy():
    tokens = tokens_of(
        leaf(-1.0, -2.0), behaviour_logprobs=[-1.0, -2.0], advantages=1.0, loss_weights=[1.0, 0.5]
    )
    losses, _ = token_losses(Objective(ReinforceLoss(), entropy_coef=0.25), tokens)
    [gradient] = torch.autograd.grad(losses.sum(), tokens.entropy)
    assert gradient.tolist() == [-0.25, -0.125]


def reject_far(log_ratio, sequence, *, bound):
    return 3.0 * torch.ones_like(log_ratio), log_ratio < bound, {}


def shortest_first(tokens, *, power):
    return tokens.logprobs * power, {}


def test_a_token_that_a_correction_rejects_has_no_loss_whatever_is_added_to_it():
    correction = PluginCorrection(function=f"{__name__}:reject_far", settings={"bound": 0.5})
    objective = Objective(
        ReinforceLoss(), correction, entropy_coef=1.0, reference=ReferenceConfig(kl_coef=1.0)
    )
    tokens = tokens_of(leaf(0.0, 1.0), behaviour_logprobs=0.0, advantages=1.0, reference_logprobs=0.0)
    losses, gradient, sums = worked_out(objective, tokens)
    assert (losses, gradient[1], sums["rejected_tokens"]) == ([0.0, 0.0], 0.0, 1)
    assert gradient[0] == -3.0


def test_a_loss_of_the_users_own_gets_its_settings():
    loss = PluginLoss(function=f"{__name__}:shortest_first", settings={"power": 2.0})
    losses, gradient, _ = worked_out(Objective(loss), tokens_of(leaf(-1.0, -3.0)))
    assert (losses, gradient) == ([-2.0, -6.0], [2.0, 2.0])


@pytest.mark.parametrize(
    ("kind", "function", "settings", "message"),
    [
        ("loss", "shortest_first", {}, r"is called with \(tokens\): missing a required argument: 'power'"),
        ("loss", "shortest_first", {"power": 1, "speed": 2}, "unexpected keyword argument 'speed'"),
        ("correction", "shortest_first", {"power": 1}, r"is called with \(log_ratio, sequence, power=...\)"),
        ("aggregation", "longest_first", {}, f"'longest_first' in {HERE!r} does not exist"),
    ],
)
def test_a_function_of_the_users_own_that_does_not_fit_is_named(kind, function, settings, message):
    with pytest.raises(ConfigError, match=message):
        load_plugin(kind, Plugin(function=f"{HERE}:{function}", settings=settings))


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
    found = kl_estimates(logprobs, reference, estimator=estimator)
    assert found.tolist() == pytest.approx(expected, rel=1e-4)
    found.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx(slope, rel=1e-4, abs=1e-4)


def test_k3_far_below_the_reference_never_pushes_further_away():
    logprobs = leaf(-19.0, -21.0, -100.0)
    kl_estimates(logprobs, torch.zeros(3), estimator="k3").sum().backward()
    assert logprobs.grad[0] < 0
    assert logprobs.grad[1:].tolist() == [0.0, 0.0]


def test_a_correction_of_the_users_own_sees_whole_sequences():
    correction = PluginCorrection(function=f"{__name__}:reject_far", settings={"bound": 0.5})
    assert not Objective(ReinforceLoss(), correction).is_separable


def test_an_unbiased_estimate_is_weighed_before_it_is_cut_off():
    logprobs, reference = torch.tensor([0.0, 0.0]), torch.tensor([-20.0, -20.0])
    ratio = torch.tensor([0.25, 2.0])
    found = kl_estimates(logprobs, reference, estimator="low_var_kl", importance_ratio=ratio)
    assert found.tolist() == [4.75, 10.0]


def test_the_mean_of_k1_and_of_k3_over_the_policy_is_the_divergence():
    policy, reference = (torch.randn(50, generator=torch.Generator().manual_seed(n)) for n in (0, 1))
    policy, reference = policy.double().log_softmax(-1), reference.double().log_softmax(-1)
    divergence = (policy.exp() * (policy - reference)).sum()
    for estimator in ("k1", "k3"):
        estimates = kl_estimates(policy, reference, estimator=estimator)
        assert (policy.exp() * estimates).sum().item() == pytest.approx(divergence.item(), rel=1e-9)


def test_a_reference_in_the_advantage_and_a_weight_by_hand():
    # the advantage 1 loses 0.5 * k1 = 0.5 * log(2), and the token weighs a quarter
    tokens = tokens_of(
        leaf(log(0.4)), behaviour_logprobs=log(0.4), reference_logprobs=log(0.2), advantages=1.0,
        loss_weights=0.25,
    )  # fmt: skip
    reference = ReferenceConfig(kl_coef=0.5, kl_estimator="k1", kl_in="advantage")
    losses, gradient, sums = worked_out(Objective(ReinforceLoss(), TokenTIS(), reference=reference), tokens)
    assert gradient == pytest.approx([-0.25 * (1 - 0.5 * log(2))], rel=1e-6)
    assert losses == pytest.approx([-0.25 * (1 - 0.5 * log(2)) * log(0.4)], rel=1e-6)
    assert sums["reference_k3"] == pytest.approx(log(2) - 1 + exp(-log(2)), rel=1e-5)
