from math import inf, log, nan

import pytest
import torch

from learner.algorithms.diagnostics import off_policy_diagnostics, off_policy_sums


def diagnose(ratios, advantages, versions, mask, *, truncation_cap=2.0):
    sums = off_policy_sums(
        torch.tensor([log(r) for r in ratios]),
        torch.zeros(len(ratios)),
        torch.tensor(advantages),
        torch.tensor(versions),
        torch.tensor(mask),
        policy_version=5,
        truncation_cap=truncation_cap,
    )
    return off_policy_diagnostics({name: value.item() for name, value in sums.items()})


def test_diagnostics_by_hand():
    found = diagnose([3.0, 1.0, 0.5, 0.5], [1.0, 1.0, -1.0, 1.0], [4, 5, 5, 5], [True, True, True, False])
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
    found = diagnose([1.0, 1.0], [1.0, -1.0], [5, 5], [True, True])
    assert found["ess_fraction"] == found["importance_ratio"] == 1.0
    assert found["k1_nats"] == found["k3_nats"] == found["mismatch_nats"] == 0.0
    assert "drift_nats" not in found


def test_masked_positions_may_hold_anything():
    sums = off_policy_sums(
        torch.tensor([-1.0, nan, 0.0]),
        torch.tensor([-1.0, 0.0, -inf]),
        torch.tensor([1.0, nan, inf]),
        torch.tensor([5, 5, 5]),
        torch.tensor([True, False, False]),
        policy_version=5,
        truncation_cap=2.0,
    )
    assert sums["tokens"] == 1
    assert all(value.isfinite() for value in sums.values())
