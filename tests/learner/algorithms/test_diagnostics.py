"""Diagnostics against numbers worked out by hand."""

from dataclasses import replace
from math import exp, log

import numpy as np
import pytest
import torch

from learner.algorithms.diagnostics import RATIO_EDGES, off_policy_diagnostics, off_policy_sums
from learner.algorithms.losses.objective import Objective, token_losses
from learner.config.correction import TokenTIS
from learner.config.loss import PPOClipLoss, ReinforceLoss
from tests.learner.algorithms.loss_inputs import tokens_of


def diagnose(log_ratios, advantages, versions, objective=None, over_older_kv=False):
    tokens = tokens_of(
        torch.tensor(log_ratios, requires_grad=True),
        behaviour_logprobs=0.0, advantages=advantages, policy_versions=versions,
        over_older_kv=over_older_kv,
    )  # fmt: skip
    tokens = replace(tokens, policy_version=5)
    sums = off_policy_sums(tokens)
    if objective is not None:
        sums |= token_losses(objective, tokens)[1]
    return off_policy_diagnostics({name: value.item() for name, value in sums.items()})


def test_diagnostics_by_hand():
    found = diagnose([log(3.0), 0.0, log(0.5)], [1.0, 1.0, -1.0], [4, 5, 5])
    assert found["importance_ratio"] == pytest.approx(1.5)
    assert found["ess_fraction"] == pytest.approx(4.5**2 / (3 * 10.25))
    assert found["chi_square"] == pytest.approx((4 + 0 + 0.25) / 3)
    assert found["k1_nats"] == pytest.approx(-(log(3) + log(0.5)) / 3)
    assert found["k3_nats"] == pytest.approx((3 - 1 - log(3) + 0.5 - 1 - log(0.5)) / 3, rel=1e-5)
    assert found["stale_fraction"] == pytest.approx(1 / 3)
    assert found["drift_nats"] == pytest.approx(log(3))
    assert found["mismatch_nats"] == pytest.approx(log(2) / 2)
    assert found["bit_equal_fraction"] == 0.5, "of the two tokens of this version"
    assert found["importance_ratio_max"] == pytest.approx(exp(20 * 0.8**13))  # the edge above log(3)


def test_figures_are_split_by_the_weights_of_keys_and_values():
    ratios, versions = [log(3.0), log(2.0), 0.0, log(0.5)], [4, 5, 5, 5]
    found = diagnose(ratios, [1.0] * 4, versions, over_older_kv=[False, True, False, False])
    assert found["older_kv_fraction"] == 0.25
    assert found["mismatch_nats"] == pytest.approx(log(2) / 2), "of the last two"
    assert found["mismatch_older_kv_nats"] == pytest.approx(log(2))
    assert found["drift_nats"] == pytest.approx(log(3))
    assert found["bit_equal_fraction"] == 0.5
    assert found["ess_fraction_own_kv"] == pytest.approx(4.5**2 / (3 * 10.25))
    assert found["ess_fraction_older_kv"] == 1.0
    assert found["k1_nats_own_kv"] == pytest.approx(-(log(3) + log(0.5)) / 3)
    assert found["k1_nats_older_kv"] == pytest.approx(-log(2))
    assert found["k3_nats_older_kv"] == pytest.approx(2 - 1 - log(2))
    assert found["k3_nats_own_kv"] == pytest.approx((3 - 1 - log(3) + 0.5 - 1 - log(0.5)) / 3, rel=1e-5)
    whole = diagnose(ratios, [1.0] * 4, versions)
    assert whole["older_kv_fraction"] == 0.0
    assert not [name for name in whole if name.endswith(("_own_kv", "_older_kv"))]


def test_what_is_clipped_or_truncated_is_told_by_the_sign_of_its_advantage():
    ratios, advantages, versions = [log(3.0), 0.0, log(4.0), log(5.0)], [1.0, 1.0, -1.0, -1.0], [5] * 4
    truncated = diagnose(ratios, advantages, versions, Objective(ReinforceLoss(), TokenTIS()))
    assert truncated["truncated_fraction_positive"] == 0.5
    assert truncated["truncated_fraction_negative"] == 1.0
    clipped = diagnose(ratios, advantages, versions, Objective(PPOClipLoss()))
    assert (clipped["clipped_fraction_positive"], clipped["clipped_fraction_negative"]) == (0.5, 0.0)
    masked = diagnose(
        ratios, advantages, versions, Objective(ReinforceLoss(), TokenTIS(truncation_cap=4.5, bound="mask"))
    )
    assert (masked["rejected_fraction_positive"], masked["rejected_fraction_negative"]) == (0.0, 0.5)


def test_tokens_are_counted_by_their_staleness():
    found = diagnose([0.0] * 8, [1.0] * 8, [5, 6, 4, 3, 2, 1, 0, -40])
    # staleness 0, 0 (a version from a learner that died), 1, 2, 3, 4, 5 and 45
    shares = {name: found[f"stale_tokens_{name}"] * 8 for name in (0, 1, 2, 4, 8, 16, 32, "more")}
    assert shares == {0: 2, 1: 1, 2: 1, 4: 2, 8: 1, 16: 0, 32: 0, "more": 1}


def test_tokens_are_counted_by_their_importance_ratio():
    ratios = [0.1, 0.6, 0.9, 1.0, 1.0, 1.2, 1.9, 7.0]
    found = diagnose([log(ratio) for ratio in ratios], [1.0] * 8, [5] * 8)
    shares = {name: found[f"ratio_tokens_{name}"] * 8 for name in (0.5, 0.8, 0.95, 1.05, 1.25, 2.0, "more")}
    assert shares == {0.5: 1, 0.8: 1, 0.95: 1, 1.05: 2, 1.25: 1, 2.0: 1, "more": 1}


def test_the_percentile_from_the_histogram_is_within_a_bin_of_the_exact_one():
    log_ratios = np.random.default_rng(0).normal(0, 0.3, 5000)
    found = diagnose(log_ratios.tolist(), [1.0] * 5000, [5] * 5000)
    exact, largest = np.quantile(log_ratios, 0.99), log_ratios.max()
    bins = np.array(RATIO_EDGES)
    assert np.searchsorted(bins, log(found["importance_ratio_p99"])) == np.searchsorted(bins, exact)
    assert found["importance_ratio_p99"] == pytest.approx(np.exp(exact), rel=0.05)
    assert log(found["importance_ratio_max"]) == pytest.approx(bins[np.searchsorted(bins, largest)])


def test_on_policy_data_is_perfect():
    found = diagnose([0.0, 0.0], [1.0, -1.0], [5, 5])
    assert found["ess_fraction"] == found["importance_ratio"] == found["stale_tokens_0"] == 1.0
    assert found["k1_nats"] == found["k3_nats"] == found["mismatch_nats"] == found["chi_square"] == 0.0
    assert found["importance_ratio_max"] == pytest.approx(1.0, abs=0.011)
    assert "drift_nats" not in found


@pytest.mark.parametrize("log_ratio", [400.0, 1e30, -400.0, -1e30])
def test_a_log_prob_that_cannot_be_true_does_not_overflow_after_the_weights_were_updated(log_ratio):
    found = diagnose([log_ratio, 0.0], [1.0, -1.0], [5, 5])
    assert found["mismatch_nats"] == pytest.approx(abs(log_ratio) / 2)
    assert torch.tensor(list(found.values()), dtype=torch.float64).isfinite().all()
