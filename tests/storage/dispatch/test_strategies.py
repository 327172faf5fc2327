"""The random strategies: by hand, and by the frequencies of many draws."""

from collections.abc import Sequence
from itertools import permutations

import numpy as np
import pytest

from storage.config import FifoSampler, FreshnessSampler, PrioritySampler, Sampler, UniformSampler
from storage.dispatch.sampling import (
    SPREAD_FLOOR,
    Candidate,
    Index,
    Question,
    choose,
    draw,
    importance_weights,
    lacking,
    room,
    strategy_weights,
)

STEPS = 4000


def index(versions: Sequence[int], spreads: Sequence[float] = ()) -> Index:
    spreads = spreads or [0.0] * len(versions)
    groups = [Candidate(v, n, s) for n, (v, s) in enumerate(zip(versions, spreads, strict=True))]
    return Index.of((group, 0) for group in groups)


def chi_square(observed: Sequence[int], expected: Sequence[float]) -> float:
    return float(sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True)))


# --- chances ---


def test_uniform_treats_all_alike():
    assert strategy_weights(UniformSampler(), index([0, 3, 9]), 9).tolist() == [1.0, 1.0, 1.0]


def test_freshness_falls_with_staleness_and_a_dead_learners_groups_count_as_fresh():
    weights = strategy_weights(FreshnessSampler(exponent=2.0), index([1, 3, 4, 7]), 4)
    assert weights == pytest.approx([1 / 16, 1 / 4, 1.0, 1.0])
    assert strategy_weights(FreshnessSampler(exponent=0.0), index([1, 4]), 4).tolist() == [1.0, 1.0]


def test_priority_is_the_product_of_its_factors():
    sampler = PrioritySampler(advantage_exponent=2.0, freshness_exponent=1.0)
    weights = strategy_weights(sampler, index([2, 4, 4], [0.25, 0.5, 0.0]), 4)
    expected = [(0.25 + SPREAD_FLOOR) ** 2 / 3, (0.5 + SPREAD_FLOOR) ** 2, SPREAD_FLOOR**2]
    assert weights == pytest.approx(expected)


def test_importance_weights_undo_the_preference_up_to_a_factor():
    weights, chosen = np.array([1.0, 2.0, 5.0]), np.array([2, 0])
    # chances 5/8 and 1/8 of three groups: (15/8)^-1 and (3/8)^-1, over the larger
    assert importance_weights(weights, chosen, 1.0) == pytest.approx([0.2, 1.0])
    assert importance_weights(weights, chosen, 0.5) == pytest.approx([0.2**0.5, 1.0])
    assert importance_weights(np.ones(3), chosen, 0.7).tolist() == [1.0, 1.0]


# --- frequencies, with a fixed seed ---


@pytest.mark.parametrize(
    "weights", [[1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 0.5, 1 / 3, 0.25, 0.2], [1e-3, 0.5, 0.5, 0.1, 0.2]]
)
def test_single_draws_follow_the_weights(weights: list[float]):
    array = np.array(weights)
    drawn = [int(draw(array, 1, seed=11, step=step)[0]) for step in range(STEPS)]
    observed = np.bincount(drawn, minlength=5)
    assert chi_square(observed, STEPS * array / array.sum()) < 18.5  # 4 degrees of freedom, p = 0.001


def test_further_draws_follow_the_weights_of_those_that_are_left():
    weights = np.array([1.0, 2.0, 3.0])
    pairs = list(permutations(range(3), 2))
    drawn = [tuple(draw(weights, 2, seed=12, step=step).tolist()) for step in range(STEPS)]
    chance = {(i, j): weights[i] / 6 * weights[j] / (6 - weights[i]) for i, j in pairs}
    observed = [drawn.count(pair) for pair in pairs]
    assert chi_square(observed, [STEPS * chance[pair] for pair in pairs]) < 20.5  # 5 degrees, p = 0.001


def test_weighted_mean_over_draws_is_the_plain_mean_at_exponent_one():
    """What the correction is for (arXiv:1511.05952, section 3.4): self-normalised over many steps."""
    weights, values = np.array([1.0, 2.0, 4.0, 1.0]), np.array([3.0, -1.0, 0.5, 8.0])
    drawn = np.array([int(draw(weights, 1, seed=13, step=step)[0]) for step in range(STEPS)])
    corrections = importance_weights(weights, drawn, 1.0)
    assert np.average(values[drawn], weights=corrections) == pytest.approx(values.mean(), abs=0.2)


# --- choices ---

ALL: list[Sampler] = [FifoSampler(), UniformSampler(), FreshnessSampler(), PrioritySampler()]


@pytest.mark.parametrize("sampler", ALL, ids=lambda sampler: sampler.type)
def test_choice_depends_on_nothing_but_the_seed_the_step_and_the_groups(sampler: Sampler):
    stored = [Candidate(n % 3, n, n / 10) for n in range(12)]
    first, again = (
        choose(sampler, order, (), (), Question(groups=4, train_version=2, max_staleness=2, step=8, seed=1))
        for order in (stored, stored[::-1])
    )
    assert first == again
    assert len(set(first.leases)) == 4


def test_steps_and_seeds_draw_differently():
    stored = [Candidate(0, n) for n in range(40)]
    chosen = {
        choose(
            UniformSampler(), stored, (), (),
            Question(groups=5, train_version=0, max_staleness=0, step=step, seed=seed),
        ).leases
        for step in range(5) for seed in range(5)
    }  # fmt: skip
    assert len(chosen) == 25


@pytest.mark.parametrize("kind", [FifoSampler, UniformSampler, FreshnessSampler, PrioritySampler])
def test_groups_past_the_window_or_used_up_are_not_chosen(kind: type[Sampler]):
    used = [(Candidate(2, 0), 1), (Candidate(2, 1), 2), (Candidate(1, 2), 1), (Candidate(3, 3), 1)]
    question = Question(groups=3, train_version=4, max_staleness=2)
    choice = choose(kind(max_reuse=2), [Candidate(4, 4)], used, (), question)
    assert sorted(choice.leases) == [0, 3, 4]


@pytest.mark.parametrize("kind", [UniformSampler, FreshnessSampler, PrioritySampler])
def test_random_strategies_await_groups_at_their_deadline_and_no_others(kind: type[Sampler]):
    stored = [Candidate(3, n) for n in range(4)]
    question = Question(groups=2, train_version=3, max_staleness=2)
    assert choose(kind(), stored, (), [Candidate(2, 8), Candidate(0, 9)], question).leases
    waiting = choose(kind(), stored, (), [Candidate(1, 8), Candidate(2, 9)], question)
    assert waiting.blockers == (8,)
    assert waiting.waiting_for == "group 8, rolling out since version 1, must be trained by version 3"


# --- how much to issue ---


def test_room_is_the_capacity_of_the_steps_within_the_bound():
    assert room(owed=0, groups=4, max_staleness=2, samples_each=1) == 12
    assert room(owed=9, groups=4, max_staleness=2, samples_each=1) == 3
    assert room(owed=99, groups=4, max_staleness=2, samples_each=1) == 0
    assert room(owed=3, groups=4, max_staleness=2, samples_each=2) == 4
    assert room(owed=0.3, groups=1, max_staleness=0, samples_each=0.1) == 7


def test_groups_lacking_for_the_largest_ratio():
    assert lacking(samples=10, inserted=6, groups=2, at_most=2.0) == 0
    assert lacking(samples=11, inserted=6, groups=2, at_most=2.0) == 1
    assert lacking(samples=0, inserted=0, groups=4, at_most=1.0) == 4
