"""Rejections and sequence weights against numbers worked out by hand."""

from dataclasses import replace
from math import exp, inf, log

import pytest
import torch
from pydantic import ValidationError

from learner.algorithms.corrections import sequence_tis
from learner.algorithms.diagnostics import off_policy_sums
from learner.algorithms.losses.objective import Objective, token_losses
from learner.backends.update.loss_step import step_diagnostics
from learner.config.correction import (
    BinaryKL,
    BinaryTV,
    NegativeDivergence,
    NoRejection,
    SequenceRange,
    SequenceTIS,
    TokenRange,
    TokenTIS,
    Veto,
)
from learner.config.learner import LearnerConfig
from learner.config.loss import CISPOLoss, PPOClipLoss, SAPOLoss, TOPRLoss
from tests.learner.algorithms.loss_inputs import SEQUENCE, kept, leaf, tokens_of, worked_out
from tests.learner.choices import REJECTIONS


def test_a_token_out_of_the_range_of_ratios_is_rejected():
    # ratios 0.4, 0.5, 5 and 6
    found = kept(TokenRange(), [0.2, 0.25, 0.5, 0.6], [0.5, 0.5, 0.1, 0.1], advantages=1.0)
    assert found == [False, True, True, False]


def test_a_token_is_rejected_only_where_its_advantage_would_push_it_further():
    now, then = [0.5, 0.5, 0.1, 0.1], [0.2, 0.2, 0.4, 0.4]  # moved by +0.3 and -0.3
    assert kept(BinaryTV(largest_change=0.29), now, then, advantages=[1.0, -1.0, 1.0, -1.0]) == [
        False,
        True,
        True,
        False,
    ]
    assert kept(BinaryTV(largest_change=0.31), now, then, advantages=[1.0, -1.0, 1.0, -1.0]) == [True] * 4
    # KL(0.2 || 0.5) = 0.2 log 0.4 + 0.8 log 1.6 = 0.1927, KL(0.4 || 0.1) = 0.4 log 4 + 0.6 log 2/3 = 0.3112
    assert kept(BinaryKL(largest_kl=0.2), now, then, advantages=[1.0, -1.0, 1.0, -1.0]) == [
        True,
        True,
        True,
        False,
    ]
    assert kept(BinaryKL(largest_kl=0.19), now, then, advantages=[1.0, -1.0, 1.0, -1.0]) == [
        False,
        True,
        True,
        False,
    ]


def test_sequences_are_rejected_by_the_mean_or_product_of_their_ratios():
    now, then = [0.2, 0.2, 0.4, 0.2], [0.1, 0.2, 0.2, 0.1]  # means sqrt(2) and 2, products 2 and 4
    for over, highest in (("mean", 1.5), ("product", 3.0)):
        rejection = SequenceRange(over=over, lowest_of_sequence=0.5, highest_of_sequence=highest)
        assert kept(rejection, now, then, advantages=1.0) == [True, True, False, False]


def test_one_impossible_token_vetoes_its_sequence():
    now, then = [0.5, 1e-6, 0.5, 0.4], [0.5, 0.5, 0.5, 0.5]
    assert kept(Veto(), now, then, advantages=1.0) == [False, False, True, True]


def test_a_sequence_of_negative_advantage_that_has_become_less_likely_is_rejected():
    now, then = [0.2, 0.4, 0.4, 0.4], [0.4, 0.4, 0.2, 0.4]  # mean drops log(2) / 2 and -log(2) / 2
    rejection = NegativeDivergence(largest_drop=0.3)
    assert kept(rejection, now, then, advantages=-1.0) == [False, False, True, True]
    assert kept(rejection, now, then, advantages=1.0) == [True] * 4


@pytest.mark.parametrize(
    ("over", "cap", "weights"),
    [
        ("product", inf, [6.0, 6.0, 0.5]),
        ("product", 2.0, [2.0, 2.0, 0.5]),
        ("mean", inf, [6**0.5, 6**0.5, 0.5]),
    ],
)
def test_the_tokens_of_a_sequence_share_its_weight(over, cap, weights):
    log_ratio = torch.tensor([log(2), log(3), log(0.5)])
    found, kept_tokens, sums = sequence_tis(log_ratio, torch.tensor([4, 4, 7]), sequence_cap=cap, over=over)
    assert found.tolist() == pytest.approx(weights, rel=1e-6)
    assert kept_tokens.all()
    assert sums["truncated_tokens"].sum() == (2 if cap == 2.0 else 0)


def test_cispo_by_hand():
    # ratios 2, 2 and 1/4; the weights are cut off at 1.5 and 0.5
    tokens = tokens_of(
        leaf(log(0.4), log(0.4), log(0.05)), behaviour_logprobs=log(0.2), advantages=[1.0, -2.0, 1.0]
    )
    losses, gradient, sums = worked_out(Objective(CISPOLoss(lowest_weight=0.5, highest_weight=1.5)), tokens)
    assert losses == pytest.approx([-1.5 * log(0.4), 3 * log(0.4), -0.5 * log(0.05)], rel=1e-5)
    assert gradient == pytest.approx([-1.5, 3.0, -0.5], rel=1e-5)
    assert sums == {"clipped_tokens": 3}


def test_sapo_by_hand():
    # ratios 1 and 2: 4 sigmoid(0) = 2, and 4 / 2 sigmoid(2) for a negative advantage
    tokens = tokens_of(leaf(log(0.2), log(0.4)), behaviour_logprobs=log(0.2), advantages=[1.0, -1.0])
    losses, gradient, _ = worked_out(Objective(SAPOLoss(temperature=1.0, temperature_negative=2.0)), tokens)
    gate = 1 / (1 + exp(-2))
    assert losses == pytest.approx([-2.0, 2 * gate], rel=1e-5)
    assert gradient == pytest.approx([-1.0, 4 * gate * (1 - gate) * 2], rel=1e-5)


def test_topr_by_hand():
    # sequence 0 has the ratio 1/2, sequence 1 the ratio 4, which counts as 1 where the advantage is negative
    tokens = tokens_of(
        leaf(log(0.1), log(0.4), log(0.4), log(0.4)),
        sequence=SEQUENCE, behaviour_logprobs=[log(0.2), log(0.4), log(0.2), log(0.2)],
        advantages=[-1.0, 3.0, -1.0, 2.0],
    )  # fmt: skip
    _, gradient, sums = worked_out(Objective(TOPRLoss()), tokens)
    assert gradient == pytest.approx([0.5, -3.0, 1.0, -2.0], rel=1e-5)
    assert sums == {"clipped_tokens": 1}


def test_dual_clip_by_hand():
    # ratio 4 at the advantage -1: beyond 3 there is no gradient; at +1 the ordinary clip has none
    tokens = tokens_of(
        leaf(log(0.8), log(0.5), log(0.8)), behaviour_logprobs=log(0.2), advantages=[-1.0, -1.0, 1.0]
    )
    losses, gradient, sums = worked_out(Objective(PPOClipLoss(dual_clip=3.0)), tokens)
    assert losses == pytest.approx([3.0, 2.5, -1.2], rel=1e-5)
    assert gradient == pytest.approx([0.0, 2.5, 0.0], rel=1e-5)
    assert sums == {"clipped_tokens": 2}


def test_of_several_rejections_each_is_told_and_what_all_keep_is_trained():
    tokens = tokens_of(
        leaf(-1.0, -1.0, -1.0, -1.0, -1.0),
        behaviour_logprobs=[-1.0, -3.0, -1.0, 11.0, -1.0],
        advantages=[1.0, 1.0, -1.0, 1.0, 1.0],
        sequence=(0, 0, 1, 1, 2),
    )
    learner = LearnerConfig(
        rejection=TokenRange(),  # leaves out the tokens whose ratios are e^2 and e^-12
        rejections={"impossible": Veto(), "nothing": NoRejection()},  # and the sequence of the latter
    )
    assert not Objective.of(learner).is_separable
    objective = replace(Objective.of(learner), correction=TokenTIS(bound="mask", floor=1e-9))
    _, gradient, sums = worked_out(objective, tokens)
    assert [found != 0 for found in gradient] == [True, False, False, False, True]
    counts = {name: value for name, value in sums.items() if name.startswith("rejected")}
    assert counts == {
        "rejected_tokens": 3,
        "rejected_by_correction_tokens": 1,
        "rejected_by_token_range_tokens": 2,
        "rejected_by_veto_tokens": 2,
    }
    _, found = token_losses(objective, tokens)
    shares = step_diagnostics(found | off_policy_sums(tokens) | {"entropy": 0.0}, tokens=5)
    assert shares["rejected_fraction"] == pytest.approx(3 / 5)
    assert shares["rejected_by_veto_fraction"] == pytest.approx(2 / 5)
    assert shares["rejected_by_veto_fraction_positive"] == pytest.approx(1 / 4)
    assert shares["rejected_by_veto_fraction_negative"] == 1


def test_two_rejections_that_pick_tokens_alike_are_refused():
    settings = {"a": {"type": "second_moment"}, "b": {"type": "second_moment", "largest_moment": 0.1}}
    with pytest.raises(ValidationError, match=r"second_moment is there twice, .*=0.04.* and .*=0.1.*"):
        LearnerConfig(rejections=settings)


@pytest.mark.parametrize("loss", [CISPOLoss(), SAPOLoss(), TOPRLoss(), PPOClipLoss(dual_clip=3.0)])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("behaviour", [-400.0, 0.0])
def test_recorded_log_probs_that_cannot_be_leave_losses_and_gradients_finite(loss, advantage, behaviour):
    for type_ in set(REJECTIONS) - {"second_moment"}:  # which judges before the loss
        rejections = LearnerConfig(rejection={"type": type_}).used_rejections
        tokens = tokens_of(leaf(-1.0, -90.0), behaviour_logprobs=behaviour, advantages=advantage)
        losses, gradient, _ = worked_out(Objective(loss, rejections=rejections), tokens)
        assert torch.tensor([*losses, *gradient]).isfinite().all(), type_


@pytest.mark.parametrize("loss", [CISPOLoss(), SAPOLoss(temperature_negative=1.0), TOPRLoss()])
def test_on_policy_each_loss_has_the_gradient_of_reinforce(loss):
    tokens = tokens_of(leaf(-1.0, -2.0), behaviour_logprobs=[-1.0, -2.0], advantages=[0.5, -1.5])
    _, gradient, _ = worked_out(Objective(loss), tokens)
    assert gradient == pytest.approx([-0.5, 1.5], rel=1e-6)


def test_a_correction_beside_a_loss_that_has_its_own_ratio_is_refused_a_rejection_is_not():
    for type_ in ("cispo", "sapo", "topr"):
        with pytest.raises(ValueError, match=r"learner.correction.type=sequence_tis has no effect"):
            LearnerConfig(loss={"type": type_}, correction=SequenceTIS())
        assert LearnerConfig(loss={"type": type_}, rejection=Veto()).used_correction.type == "none"
