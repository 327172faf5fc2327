"""Losses beyond the first seven against numbers worked out by hand; limits and finite differences of all."""

from dataclasses import replace
from math import exp, log

import numpy as np
import pytest
import torch

from learner.algorithms.losses.kl import DIRECTIONS, top_k_kl
from learner.algorithms.losses.objective import Objective
from learner.config.correction import SequenceTIS, TokenTIS
from learner.config.frozen_policies import ReferenceConfig
from learner.config.learner import LearnerConfig
from learner.config.loss import (
    AIPOLoss,
    ClipCovLoss,
    GMPOLoss,
    GSPOLoss,
    KLCovLoss,
    PPOClipLoss,
    RegressionLoss,
    ReinforceLoss,
    SFTLoss,
    VESPOLoss,
)
from tests.learner.algorithms.loss_inputs import leaf, tokens_of, worked_out
from tests.learner.choices import LOSSES as ALL_LOSSES

SEQUENCE = (0, 0, 0, 1, 1, 2)


def test_aipo_is_reinforce_with_token_tis():
    now, then, advantages = [log(0.8), log(0.1), log(0.5)], log(0.2), [1.0, 1.0, -2.0]
    tokens = tokens_of(leaf(*now), behaviour_logprobs=then, advantages=advantages)
    losses, gradient, sums = worked_out(Objective(AIPOLoss(ratio_cap=3.0)), tokens)
    assert gradient == pytest.approx([-3.0, -0.5, 5.0], rel=1e-5)  # ratios 4, 1/2 and 5/2
    assert sums == {"clipped_tokens": 1}
    tis = Objective(ReinforceLoss(), TokenTIS(truncation_cap=3.0))
    assert worked_out(tis, tokens)[:2] == (pytest.approx(losses), pytest.approx(gradient))


def test_gmpo_by_hand():
    # log ratios log(2), log(1/4) and, in a sequence of its own, log(4); what is beyond 0.4 is cut off where
    # the advantage pushes further: log(2) of sequence 0, and not log(4) of sequence 1
    tokens = tokens_of(
        leaf(log(0.4), log(0.05), log(0.8)),
        sequence=(0, 0, 1),
        behaviour_logprobs=log(0.2),
        advantages=[1.0, 1.0, -1.0],
    )
    losses, gradient, sums = worked_out(Objective(GMPOLoss()), tokens)
    ratio = exp((0.4 + log(0.25)) / 2)
    assert losses == pytest.approx([-ratio, -ratio, 4.0], rel=1e-5)
    # each of two tokens' losses has the slope ratio / 2 in the token that is not cut off
    assert gradient == pytest.approx([0.0, -ratio, 4.0], rel=1e-5)
    assert sums == {"clipped_tokens": 1}


def test_gmpo_that_is_never_cut_off_is_gspo_that_never_clips():
    tokens = drawn()
    ours = worked_out(Objective(GMPOLoss(log_clip=50.0)), tokens)
    theirs = worked_out(Objective(GSPOLoss(sequence_clip_eps=50.0, sequence_clip_eps_high=50.0)), drawn())
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-5)


def test_vespo_by_hand():
    # the product of sequence 0's ratios is 2 * 1 = 2, that of sequence 1 is 1/2
    tokens = tokens_of(
        leaf(log(0.4), log(0.2), log(0.1)),
        sequence=(0, 0, 1),
        behaviour_logprobs=log(0.2),
        advantages=[1.0, 1.0, -1.0],
    )
    _, gradient, sums = worked_out(Objective(VESPOLoss()), tokens)
    up, down = 2**2 * exp(3 * (1 - 2)), 0.5**3 * exp(2 * (1 - 0.5))
    assert gradient == pytest.approx([-up, -up, down], rel=1e-5)
    assert sums == {}


def test_vespo_is_largest_where_the_ratio_is_power_over_decay():
    def weight(ratio: float) -> float:
        tokens = tokens_of(leaf(log(ratio)), behaviour_logprobs=0.0, advantages=1.0)
        return -worked_out(Objective(VESPOLoss(power=2.0, decay=4.0)), tokens)[1][0]

    assert weight(0.5) > max(weight(0.45), weight(0.55))
    assert weight(0.5) == pytest.approx(0.25 * exp(2.0), rel=1e-5)
    assert weight(1e-6) < 1e-10 > weight(1e6)


def test_the_regression_by_hand():
    # sequence 0: A = 1, r = log(2) + log(3); sequence 1: A = -1, r = log(1/2); t = 0.5
    tokens = tokens_of(
        leaf(log(0.4), log(0.6), log(0.1)),
        sequence=(0, 0, 1),
        behaviour_logprobs=log(0.2),
        advantages=[1.0, 1.0, -1.0],
    )
    losses, gradient, _ = worked_out(Objective(RegressionLoss(kl_weight=0.5)), tokens)
    r = log(6)
    assert losses[0] + losses[1] == pytest.approx((1 - 0.5 * r) ** 2 / (2 * 0.5) - 1.0, rel=1e-5)
    assert losses[2] == pytest.approx((-1 - 0.5 * log(0.5)) ** 2 / (2 * 0.5) - 1.0, rel=1e-5)
    assert gradient == pytest.approx([-(1 - 0.5 * r)] * 2 + [1 + 0.5 * log(0.5)], rel=1e-5)


def test_the_regression_has_no_gradient_where_the_log_ratio_is_what_the_advantage_asks_for():
    tokens = tokens_of(leaf(-0.5, -0.5), behaviour_logprobs=[-2.0, -1.0], advantages=4.0)
    _, gradient, _ = worked_out(Objective(RegressionLoss(kl_weight=2.0)), tokens)
    assert gradient == [0.0, 0.0]  # r = 1.5 + 0.5 = A / t


def test_clip_cov_leaves_the_picked_tokens_out():
    tokens = tokens_of(
        leaf(log(0.2), log(0.4), log(0.2)), behaviour_logprobs=log(0.2), advantages=1.0,
        picked_by_covariance=[1.0, 0.0, 0.0],
    )  # fmt: skip
    losses, gradient, sums = worked_out(Objective(ClipCovLoss()), tokens)
    assert losses == pytest.approx([0.0, -1.2, -1.0], rel=1e-5)
    assert gradient == pytest.approx([0.0, 0.0, -1.0], rel=1e-5)
    assert sums == {"clipped_tokens": 2}


def test_clip_cov_that_picks_nothing_is_ppo():
    tokens = drawn(picked_by_covariance=0.0)
    assert worked_out(Objective(ClipCovLoss()), tokens) == worked_out(Objective(PPOClipLoss()), tokens)


def test_kl_cov_by_hand():
    tokens = tokens_of(
        leaf(log(0.4), log(0.1), log(0.4)), behaviour_logprobs=log(0.2), advantages=1.0,
        picked_by_covariance=[1.0, 1.0, 0.0],
    )  # fmt: skip
    losses, gradient, _ = worked_out(Objective(KLCovLoss(picked_kl_coef=0.5)), tokens)
    assert losses == pytest.approx([-2 + 0.5 * log(2), -0.5 + 0.5 * log(2), -2.0], rel=1e-5)
    assert gradient == pytest.approx([-2 + 0.5, -0.5 - 0.5, -2.0], rel=1e-5)


def test_tokens_that_nobody_picked_from_make_a_loss_that_is_not_trained():
    for loss in (ClipCovLoss(), KLCovLoss()):
        losses, _, _ = worked_out(Objective(loss), drawn(picked_by_covariance=float("nan")))
        assert np.isnan(losses).all()


LOSSES = [AIPOLoss(), GMPOLoss(), VESPOLoss(), RegressionLoss(), ClipCovLoss(), KLCovLoss()]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.type)
def test_on_policy_each_has_the_gradient_of_reinforce(loss):
    advantages = [0.5, 0.5, 0.5, -1.5, -1.5, 1.0]
    tokens = drawn(advantages=advantages, picked_by_covariance=0.0)
    on_policy = tokens.with_streams(behaviour_logprobs=tokens.logprobs.detach())
    _, gradient, _ = worked_out(Objective(loss), on_policy)
    assert gradient == pytest.approx([-advantage for advantage in advantages], rel=1e-6)


def of_all_losses(**settings: object) -> dict[str, Objective]:
    """Every loss with its default settings, and some with others; `settings` are those of the objective."""
    losses = {name: LearnerConfig(loss={"type": name}).loss for name in TRAINED}
    losses |= {
        "gspo, wide": GSPOLoss(sequence_clip_eps=0.5),
        "dual clip": PPOClipLoss(dual_clip=1.1),
        "decoupled": PPOClipLoss(centre="proximal", proximal="recomputed"),
    }
    return {name: Objective(loss, **settings) for name, loss in losses.items()}


TRAINED = sorted(ALL_LOSSES)
KL = {
    f"{estimator}{', unbiased' if unbiased else ''}": Objective(
        PPOClipLoss(), reference=ReferenceConfig(kl_coef=0.7, kl_estimator=estimator, kl_unbiased=unbiased)
    )
    for estimator in ("k1", "k2", "k3", "low_var_kl")
    for unbiased in (False, True)
}
DIFFERENTIATED = {
    **of_all_losses(),
    **KL,
    "token tis": Objective(ReinforceLoss(), TokenTIS(truncation_cap=1.2)),
    "sequence tis": Objective(ReinforceLoss(), SequenceTIS(sequence_cap=1.2)),
    "entropy bonus": Objective(PPOClipLoss(), entropy_coef=0.3),
}
WEIGHED = ("aipo", "cispo", "reinforce", "topr", "vespo")
"""Losses that are -w A log p with a weight that has no gradient."""


@pytest.mark.parametrize("name", of_all_losses())
def test_where_all_ratios_are_1_and_so_are_advantages_each_has_the_gradient_of_supervised_training(name):
    tokens = drawn(advantages=[1.0] * 6, picked_by_covariance=[0.0] * 6)
    same = tokens.logprobs.detach()
    tokens = tokens.with_streams(behaviour_logprobs=same, proximal_logprobs=same)
    _, supervised, _ = worked_out(Objective(SFTLoss()), tokens)
    _, gradient, _ = worked_out(of_all_losses()[name], tokens)
    assert gradient == pytest.approx(supervised, rel=1e-6)


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_are_finite_differences(name):
    """In float64, of the surrogate: weights that carry no gradient are held where they are."""
    objective, step = DIFFERENTIATED[name], 1e-6
    tokens = drawn(dtype=torch.float64)
    _, gradient, _ = worked_out(objective, tokens)
    for i in range(len(SEQUENCE)):
        moved = [tokens.logprobs.detach().clone() for _ in range(2)]
        moved[0][i] -= step
        moved[1][i] += step
        low, high = (worked_out(objective, replace(tokens, logprobs=x.requires_grad_()))[0] for x in moved)
        slope = (sum(high) - sum(low)) / (2 * step)
        if (
            objective.loss.type in WEIGHED
        ):  # d(w log p) = w + dw log p: subtract what the weight's own slope gives
            weights = [worked_out(objective, replace(tokens, logprobs=x.requires_grad_()))[1] for x in moved]
            of_weights = (np.array(weights[1]) - weights[0]) / (2 * step) @ tokens.logprobs.detach().numpy()
            slope -= of_weights
        assert slope == pytest.approx(gradient[i], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_gradient_of_a_divergence_over_likeliest_tokens_is_that_of_finite_differences(direction):
    draw = torch.Generator().manual_seed(0)
    policy, teacher = (
        torch.randn(3, 5, generator=draw, dtype=torch.float64).log_softmax(-1) for _ in range(2)
    )
    policy.requires_grad_()
    assert torch.autograd.gradcheck(lambda p: top_k_kl(p, teacher, direction=direction), policy)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.type)
def test_the_division_into_micro_batches_changes_nothing(loss):
    whole = worked_out(Objective(loss), drawn())
    first, second = (rows_of(drawn(), begin, end) for begin, end in ((0, 3), (3, 6)))
    parts = [worked_out(Objective(loss), part) for part in (first, second)]
    assert parts[0][0] + parts[1][0] == pytest.approx(whole[0], rel=1e-6)
    assert parts[0][1] + parts[1][1] == pytest.approx(whole[1], rel=1e-6)


def drawn(dtype: torch.dtype = torch.float32, **streams: object):
    """Six tokens of three sequences near the policy that sampled them."""
    draw = np.random.default_rng(4)
    now = draw.uniform(-3, -0.5, 6)
    values = {
        "behaviour_logprobs": (now + draw.normal(0, 0.3, 6)).tolist(),
        "advantages": [1.0, 1.0, 1.0, -0.5, -0.5, 2.0],
        "picked_by_covariance": [1.0, 0.0, 0.0, 0.0, 1.0, 0.0],
        "proximal_logprobs": (now + draw.normal(0, 0.1, 6)).tolist(),
        "reference_logprobs": (now + draw.normal(0, 0.5, 6)).tolist(),
    }
    tokens = tokens_of(
        torch.tensor(now, dtype=dtype, requires_grad=True), sequence=SEQUENCE, **(values | streams)
    )
    if dtype == torch.float64:
        tokens = tokens.with_streams(
            **{name: values.double() for name, values in tokens.streams.items() if values.is_floating_point()}
        )
    return tokens


def rows_of(tokens, begin: int, end: int):
    logprobs = tokens.logprobs.detach()[begin:end].requires_grad_()
    sequence = tokens.sequence[begin:end] - tokens.sequence[begin]
    return replace(
        tokens,
        logprobs=logprobs,
        entropy=tokens.entropy[begin:end],
        labels=tokens.labels[begin:end],
        sequence=sequence,
        sequences=int(sequence.max()) + 1,
        positions=tokens.positions[begin:end],
        streams={name: values[begin:end] for name, values in tokens.streams.items()},
    )
