from math import log

import pytest
import torch

from learner.algorithms.diagnostics import off_policy_diagnostics, off_policy_sums
from tests.learner.algorithms.test_losses import tokens_of


def diagnose(log_ratios, advantages, versions, *, truncation_cap=2.0):
    tokens = tokens_of(
        torch.tensor(log_ratios), behaviour_logprobs=0.0, advantages=advantages, policy_versions=versions
    )
    sums = off_policy_sums(tokens, policy_version=5, truncation_cap=truncation_cap)
    return off_policy_diagnostics({name: value.item() for name, value in sums.items()})


def test_diagnostics_by_hand():
    found = diagnose([log(3.0), 0.0, log(0.5)], [1.0, 1.0, -1.0], [4, 5, 5])
    assert found["importance_ratio"] == pytest.approx(1.5)
    assert found["ess_fraction"] == pytest.approx(4.5**2 / (3 * 10.25))
    assert found["k1_nats"] == pytest.approx(-(log(3) + log(0.5)) / 3)
    assert found["k3_nats"] == pytest.approx((3 - 1 - log(3) + 0.5 - 1 - log(0.5)) / 3, rel=1e-5)
    assert found["truncated_fraction_positive"] == 0.5
    assert found["truncated_fraction_negative"] == 0.0
    assert found["stale_fraction"] == pytest.approx(1 / 3)
    assert found["drift_nats"] == pytest.approx(log(3))
    assert found["mismatch_nats"] == pytest.approx(log(2) / 2)


def test_on_policy_data_is_perfect():
    found = diagnose([0.0, 0.0], [1.0, -1.0], [5, 5])
    assert found["ess_fraction"] == found["importance_ratio"] == 1.0
    assert found["k1_nats"] == found["k3_nats"] == found["mismatch_nats"] == 0.0
    assert "drift_nats" not in found


def test_a_log_prob_that_cannot_be_true_does_not_overflow_after_the_weights_were_updated():
    found = diagnose([400.0, 0.0], [1.0, -1.0], [5, 5])
    assert found["mismatch_nats"] == 200.0
    assert torch.tensor(list(found.values())).isfinite().all()
