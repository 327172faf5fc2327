"""What becomes of importance weights out of bounds: truncated, clipped or masked."""

from math import inf, log

import pytest
import torch
from pydantic import ValidationError

from learner.algorithms.corrections import sequence_tis, token_tis
from learner.algorithms.losses.objective import Objective
from learner.config.correction import BinaryKLTwoWay, SequenceTIS, TokenTIS
from learner.config.loss import ReinforceLoss
from tests.learner.algorithms.loss_inputs import kept, leaf, tokens_of, worked_out

RATIOS = [0.2, 0.5, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("bound", "floor", "weights", "kept_tokens"),
    [
        ("truncate", None, [0.2, 0.5, 1.0, 2.0, 2.0], [True] * 5),
        ("clip", None, [0.5, 0.5, 1.0, 2.0, 2.0], [True] * 5),
        ("clip", 0.3, [0.3, 0.5, 1.0, 2.0, 2.0], [True] * 5),
        ("mask", None, [None, 0.5, 1.0, 2.0, None], [False, True, True, True, False]),
        ("mask", 0.1, [0.2, 0.5, 1.0, 2.0, None], [True, True, True, True, False]),
    ],
)
def test_weights_of_tokens_by_hand(bound, floor, weights, kept_tokens):
    log_ratio = torch.tensor(RATIOS, dtype=torch.float64).log()
    found, is_kept, counted = token_tis(
        log_ratio, torch.zeros(5, dtype=torch.int64), truncation_cap=2.0 + 1e-12, bound=bound, floor=floor
    )
    assert is_kept.tolist() == kept_tokens
    assert [w if keep else None for w, keep in zip(found.tolist(), kept_tokens, strict=True)] == [
        None if w is None else pytest.approx(w) for w in weights
    ]
    outside = [ratio > 2.0 or (bound != "truncate" and ratio < (floor or 0.5)) for ratio in RATIOS]
    assert counted["truncated_tokens"].tolist() == outside


def test_sequences_are_masked_by_the_product_or_the_geometric_mean():
    log_ratio, sequence = torch.tensor([log(2), log(2), log(0.4)]), torch.tensor([0, 0, 1])
    for over, kept_tokens in (("product", [False, False, True]), ("mean", [True, True, True])):
        weights, is_kept, _ = sequence_tis(log_ratio, sequence, sequence_cap=3.0, over=over, bound="mask")
        assert is_kept.tolist() == kept_tokens
        assert weights[2] == pytest.approx(0.4)


def test_a_masked_token_has_no_gradient_and_is_counted_as_rejected():
    tokens = tokens_of(leaf(log(0.8), log(0.2)), behaviour_logprobs=log(0.2), advantages=1.0)
    objective = Objective(ReinforceLoss(), TokenTIS(bound="mask"))
    _, gradient, sums = worked_out(objective, tokens)
    assert gradient == pytest.approx([0.0, -1.0])
    assert sums == {"truncated_tokens": 1, "rejected_tokens": 1, "rejected_by_correction_tokens": 1}


@pytest.mark.parametrize("bound", ["truncate", "clip", "mask"])
def test_without_a_cap_and_a_floor_each_form_is_plain_importance_sampling(bound):
    floor = None if bound == "truncate" else 0.0
    log_ratio = torch.tensor([-3.0, 0.0, 3.0])
    settings = {"truncation_cap": inf, "bound": bound, "floor": floor}
    weights, is_kept, _ = token_tis(log_ratio, torch.zeros(3, dtype=torch.int64), **settings)
    assert is_kept.all()
    assert weights.tolist() == log_ratio.exp().tolist()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"floor": 0.5}, "floor=0.5 has no effect with bound=truncate: set bound=clip or bound=mask"),
        ({"bound": "mask", "floor": 3.0}, "no weight is between the floor, 3.0, and the cap, 2.0"),
    ],
)
@pytest.mark.parametrize("correction", [TokenTIS, SequenceTIS])
def test_bounds_that_make_no_sense_are_refused(correction, settings, message):
    with pytest.raises(ValidationError, match=message):
        correction(**settings)


def test_a_cap_below_1_needs_a_floor_of_its_own():
    with pytest.raises(ValidationError, match=r"the floor, 2.0, and the cap, 0.5: lower the floor"):
        TokenTIS(bound="clip", truncation_cap=0.5)
    assert TokenTIS(bound="clip", truncation_cap=0.5, floor=0.1).floor == 0.1


def test_kpop_looks_at_both_directions_whatever_the_advantage():
    # KL(0.2 || 0.5) = 0.2 log 0.4 + 0.8 log 1.6 = 0.193, KL(0.5 || 0.2) = 0.5 log 2.5 + 0.5 log 0.625 = 0.223
    now, then = [0.5, 0.5, 0.2, 0.2], [0.2, 0.2, 0.5, 0.5]
    for largest, stays in ((0.22, False), (0.23, True)):
        rejection = BinaryKLTwoWay(largest_kl_either_way=largest)
        assert kept(rejection, now, then, advantages=[1.0, -1.0, 1.0, -1.0]) == [stays] * 4
