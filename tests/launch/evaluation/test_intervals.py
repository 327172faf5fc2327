"""Intervals of means over prompts."""

from random import Random
from statistics import fmean

import numpy as np
import pytest

from actors.evaluation.evaluator import pass_at
from launch.evaluation.evaluate import mean, share


def test_wilsons_interval_is_that_of_independent_answers():
    # Wilson's interval of 0 and of 5 right answers of 10, by its formula with z = 1.96.
    assert share([0.0] * 10, 10) == pytest.approx((0.0, 0.0, 0.27753), abs=1e-4)
    found = share([0.0, 1.0] * 50, 100)
    assert found == pytest.approx((0.5, 0.40383, 0.59617), abs=1e-3)
    assert share([1.0], 1) == pytest.approx((1.0, 0.20655, 1.0), abs=1e-4)
    for n in range(1, 100):  # by the formula alone, rounding leaves a bound of 2.776e-17 for some of these
        assert share([0.0] * n, n).low == 0.0
        assert share([1.0] * n, n).high == 1.0
    # Prompts that all have half of eight answers right tell as much as 8 answers each.
    assert share([0.5] * 10, 80).low == pytest.approx(0.5 - 0.1069, abs=1e-3)


@pytest.mark.parametrize(("samples", "k", "spread"), [(1, 1, 1.0), (4, 1, 0.3), (4, 4, 1.0), (8, 2, 3.0)])
def test_true_score_lies_within_the_interval_in_95_of_100_evaluations(samples: int, k: int, spread: float):
    """Prompts have a success drawn from a beta distribution; small `spread` makes them easy or hopeless."""
    rng, trials, prompts = np.random.default_rng(7), 1500, 50
    large = rng.beta(spread, spread, 400_000)
    true = fmean(1 - (1 - large) ** k)
    right = rng.binomial(samples, rng.beta(spread, spread, (trials, prompts)))
    of = [pass_at(samples, c, k) for c in range(samples + 1)]
    found = [share([of[c] for c in row], prompts * samples // k) for row in right.tolist()]
    held = fmean(one.low <= true <= one.high for one in found)
    assert 0.93 <= held <= 0.98, held


def test_rewards_of_any_size_have_a_normal_interval():
    rng = Random(3)
    held = 0
    for _ in range(1000):
        one = mean([rng.gauss(5, 2) for _ in range(60)], 60)
        held += one.low <= 5 <= one.high
    assert 0.92 <= held / 1000 <= 0.97
    assert mean([-3.0], 1) == (-3.0, -3.0, -3.0)
    assert mean([0.0, 1.0], 2) == share([0.0, 1.0], 2)
