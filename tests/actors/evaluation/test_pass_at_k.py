"""pass@k and pass^k against numbers worked by hand, all subsets, and what they estimate."""

from fractions import Fraction
from itertools import combinations
from math import comb

import pytest

from actors.evaluation.evaluator import pass_all, pass_at


def test_two_right_of_five_worked_by_hand():
    """Of the 10 pairs 3 hold no right answer, and 1 holds two."""
    assert pass_at(5, 2, 2) == pytest.approx(0.7, abs=1e-15)
    assert pass_all(5, 2, 2) == pytest.approx(0.1, abs=1e-15)
    assert [pass_at(5, 2, 1), pass_all(5, 2, 1)] == pytest.approx([0.4, 0.4], abs=1e-15)
    assert (pass_at(5, 2, 4), pass_all(5, 2, 3)) == (1.0, 0.0)
    assert (pass_at(5, 0, 5), pass_all(5, 5, 5)) == (0.0, 1.0)


@pytest.mark.parametrize("samples", range(1, 8))
def test_they_are_the_fractions_of_all_subsets(samples):
    for right in range(samples + 1):
        answers = [n < right for n in range(samples)]
        for k in range(1, samples + 1):
            drawn = list(combinations(answers, k))
            assert pass_at(samples, right, k) == pytest.approx(sum(map(any, drawn)) / len(drawn), abs=1e-14)
            assert pass_all(samples, right, k) == pytest.approx(sum(map(all, drawn)) / len(drawn), abs=1e-14)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_they_are_unbiased(k):
    """Over the binomial number of right answers their means are 1 - (1 - p)^k and p^k."""
    n, p = 8, Fraction(1, 5)
    chances = [comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    expected_any = sum(float(chance) * pass_at(n, c, k) for c, chance in enumerate(chances))
    expected_all = sum(float(chance) * pass_all(n, c, k) for c, chance in enumerate(chances))
    assert expected_any == pytest.approx(float(1 - (1 - p) ** k), abs=1e-14)
    assert expected_all == pytest.approx(float(p**k), abs=1e-14)


def test_many_samples_neither_overflow_nor_cancel():
    for right, k in ((1, 500), (3, 7), (500, 2), (999, 1000)):
        exact = 1 - Fraction(comb(1000 - right, k), comb(1000, k))
        assert pass_at(1000, right, k) == pytest.approx(float(exact), rel=1e-12)
        exact = Fraction(comb(right, k), comb(1000, k))
        assert pass_all(1000, right, k) == pytest.approx(float(exact), rel=1e-12)


@pytest.mark.parametrize(("samples", "right", "k"), [(3, 4, 1), (3, -1, 1), (3, 1, 0), (3, 1, 4)])
def test_what_cannot_be_is_refused(samples, right, k):
    for estimate in (pass_at, pass_all):
        with pytest.raises(ValueError, match="k is between 1 and the samples"):
            estimate(samples, right, k)
