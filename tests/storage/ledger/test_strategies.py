"""The random strategies: by hand, and by the frequencies of many draws."""

from collections.abc import Sequence
from itertools import combinations, pairwise, permutations

import numpy as np
import pytest

from storage.ledger.sampling import (
    SPREAD_FLOOR,
    Candidate,
    Index,
    StepRequest,
    choose,
    draw,
    importance_weights,
    inclusion_chances,
    lacking,
    room,
    strategy_weights,
    systematic,
)
from storage.settings.admission import FifoSampler, FreshnessSampler, PrioritySampler, Sampler, UniformSampler

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
    assert weights == pytest.approx([each / expected[1] for each in expected])


def test_the_strongest_preference_leaves_every_group_a_chance():
    weights = strategy_weights(FreshnessSampler(exponent=1e6), index([0, 1, 2, 2]), 2)
    assert weights.min() > 0
    for groups in (1, 2, 3, 4):
        chances = inclusion_chances(weights, groups)
        corrections = importance_weights(chances, 1.0)
        assert chances.sum() == pytest.approx(groups)
        assert np.isfinite(corrections).all()
        assert len(set(draw(chances, seed=3, step=1).tolist())) == groups


def test_chances_are_proportional_to_weights_until_they_are_one():
    weights = np.array([1.0, 2.0, 5.0])
    assert inclusion_chances(weights, 1) == pytest.approx([1 / 8, 2 / 8, 5 / 8])
    # 2 * 5 / 8 is above 1: the third is certain, and the others share one place
    assert inclusion_chances(weights, 2) == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert inclusion_chances(weights, 3).tolist() == [1.0, 1.0, 1.0]
    # the second is certain only when the third is
    assert inclusion_chances(np.array([1.0, 3.0, 5.0, 1.0]), 3) == pytest.approx([0.5, 1.0, 1.0, 0.5])


def test_importance_weights_are_those_of_the_chances_of_being_in_the_step():
    chances = np.array([1 / 3, 2 / 3, 1.0])  # of being among 2 of 3 groups
    assert importance_weights(chances, 1.0) == pytest.approx([2.0, 1.0, 2 / 3])
    halved = np.array([3**0.5, 1.5**0.5, 1.0]) * 2 / (3**-0.5 + 1.5**-0.5 + 1)
    assert importance_weights(chances, 0.5) == pytest.approx(halved)
    assert importance_weights(chances, 0.0).tolist() == [1.0, 1.0, 1.0]
    for exponent in (0.0, 0.3, 0.5, 1.0):
        assert chances @ importance_weights(chances, exponent) == pytest.approx(2.0)


# --- frequencies ---


def drawn_how_often(chances: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return each group's chance of being drawn in this order, by all marks that make a difference."""
    ends = np.cumsum(chances[order])
    edges = np.unique(np.concatenate(([0.0, 1.0], np.sort(ends % 1.0))))
    found = np.zeros(len(chances))
    for low, high in pairwise(edges):
        if high - low > 1e-12:
            chosen = systematic(chances, order, (low + high) / 2)
            assert len(set(chosen.tolist())) == round(chances.sum())
            found[chosen] += high - low
    return found


@pytest.mark.parametrize("weights", [[1, 1, 1, 1], [1, 2, 3, 4], [1e-3, 0.5, 0.5, 0.1, 0.2], [9, 1, 1, 9, 2]])
def test_every_group_of_a_tiny_store_is_drawn_with_its_chance_in_each_order(weights: list[float]):
    for count in range(1, len(weights) + 1):
        chances = inclusion_chances(np.array(weights, np.float64), count)
        for order in permutations(range(len(weights))):
            assert drawn_how_often(chances, np.array(order)) == pytest.approx(chances, abs=1e-9)


def aged(groups: int, seed: int = 0) -> list[Candidate]:
    """Return groups of 8 versions whose spreads differ, in an order that tells nothing of either."""
    random = np.random.default_rng(seed)
    versions = random.permutation(np.arange(groups) % 8)
    return [Candidate(int(v), n, float(random.choice([0.0, 0.1, 0.5]))) for n, v in enumerate(versions)]


@pytest.mark.first(4, others=pytest.mark.slow)
@pytest.mark.parametrize("groups", [33, 64, 160, 1000])
@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_expected_contribution_of_every_group_is_that_of_every_other(groups: int, exponent: float):
    """The chance of being drawn times the weight, over the chance of a uniform draw; 1 is right."""
    samplers = (
        FreshnessSampler(exponent=exponent, importance_exponent=1.0),
        PrioritySampler(advantage_exponent=exponent, freshness_exponent=1.0, importance_exponent=1.0),
    )
    found = Index.of((group, 0) for group in aged(groups))
    for sampler in samplers:
        chances = inclusion_chances(strategy_weights(sampler, found, 7), 32)
        order = np.random.default_rng(1).permutation(groups)
        contribution = drawn_how_often(chances, order) * importance_weights(chances, 1.0) * groups / 32
        assert contribution == pytest.approx(np.ones(groups), abs=1e-6)


def test_contributions_of_whole_choices_are_equal_within_a_percent():
    """Weights of drawing with replacement would make them 2.28 and 0.29 of the stalest and the freshest
    quarter."""
    stored, sampler = aged(33), FreshnessSampler(exponent=1.0, importance_exponent=1.0)
    contributions = np.zeros((400, 33))
    for step in range(400):
        question = StepRequest(groups=32, train_version=7, max_staleness=7, step=step, seed=4)
        choice = choose(sampler, stored, (), (), question)
        assert len(set(choice.leases)) == 32
        contributions[step, list(choice.leases)] = np.array(choice.weights) * 33 / 32
    versions = np.array([group.policy_version for group in stored])
    for quarter in (versions < 2, versions > 5):
        assert contributions[:, quarter].mean() == pytest.approx(1.0, abs=0.01)


@pytest.mark.slow
def test_contributions_of_many_draws_are_equal_within_a_percent():
    """Weights of drawing with replacement would make them 0.72 and 0.96."""
    found = Index.of((group, 0) for group in aged(160))
    chances = inclusion_chances(strategy_weights(FreshnessSampler(), found, 7), 32)
    drawn = np.zeros(160)
    for step in range(15_000):
        drawn[draw(chances, seed=4, step=step)] += 1 / 15_000
    contributions = drawn * importance_weights(chances, 1.0) * 160 / 32
    for quarter in (found.versions < 2, found.versions > 5):
        assert contributions[quarter].mean() == pytest.approx(1.0, abs=0.01)


def test_groups_that_no_step_may_have_take_no_share_of_the_weights():
    """Used up, expired or rolling out: the weights are those of the groups that the step could have had."""
    stored = [Candidate(2, 0), Candidate(3, 1), Candidate(4, 2), Candidate(4, 3)]
    used = [(Candidate(4, 4), 2), (Candidate(1, 5), 1), (Candidate(3, 6), 1)]
    rolling_out = [Candidate(3, 7), Candidate(4, 8)]
    sampler = FreshnessSampler(max_reuse=2, importance_exponent=1.0)
    contributions = np.zeros(9)
    for step in range(2000):
        question = StepRequest(groups=2, train_version=4, max_staleness=2, step=step, seed=5)
        choice = choose(sampler, stored, used, rolling_out, question)
        contributions[list(choice.leases)] += np.array(choice.weights)
    eligible = [0, 1, 2, 3, 6]
    assert contributions[eligible] * 5 / 2 / 2000 == pytest.approx(np.ones(5), abs=0.07)
    assert contributions[[4, 5, 7, 8]].tolist() == [0.0] * 4


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize(
    "weights", [[1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 0.5, 1 / 3, 0.25, 0.2], [1e-3, 0.5, 0.5, 0.1, 0.2]]
)
def test_single_draws_follow_the_weights(weights: list[float]):
    array = np.array(weights)
    chances = inclusion_chances(array, 1)
    drawn = [int(draw(chances, seed=11, step=step)[0]) for step in range(STEPS)]
    observed = np.bincount(drawn, minlength=5)
    assert chi_square(observed, STEPS * array / array.sum()) < 18.5  # 4 degrees of freedom, p = 0.001


def test_uniform_draws_give_every_set_of_groups_the_same_chance():
    drawn = [tuple(draw(np.full(4, 0.5), seed=12, step=step).tolist()) for step in range(STEPS)]
    observed = [drawn.count(pair) for pair in combinations(range(4), 2)]
    assert chi_square(observed, [STEPS / 6] * 6) < 20.5  # 5 degrees of freedom, p = 0.001


def test_weighted_sum_over_draws_is_the_plain_mean_at_exponent_one():
    weights, values = np.array([1.0, 2.0, 4.0, 1.0]), np.array([3.0, -1.0, 0.5, 8.0])
    chances = inclusion_chances(weights, 2)
    corrections, total = importance_weights(chances, 1.0), 0.0
    for step in range(STEPS):
        chosen = draw(chances, seed=13, step=step)
        total += float((corrections[chosen] * values[chosen]).mean())
    assert total / STEPS == pytest.approx(values.mean(), abs=0.2)


# --- choices ---

ALL: list[Sampler] = [FifoSampler(), UniformSampler(), FreshnessSampler(), PrioritySampler()]


@pytest.mark.parametrize("sampler", ALL, ids=lambda sampler: sampler.type)
def test_choice_depends_on_nothing_but_the_seed_the_step_and_the_groups(sampler: Sampler):
    stored = [Candidate(n % 3, n, n / 10) for n in range(12)]
    first, again = (
        choose(
            sampler, order, (), (), StepRequest(groups=4, train_version=2, max_staleness=2, step=8, seed=1)
        )
        for order in (stored, stored[::-1])
    )
    assert first == again
    assert len(set(first.leases)) == 4


def test_steps_and_seeds_draw_differently():
    stored = [Candidate(0, n) for n in range(40)]
    chosen = {
        choose(
            UniformSampler(), stored, (), (),
            StepRequest(groups=5, train_version=0, max_staleness=0, step=step, seed=seed),
        ).leases
        for step in range(5) for seed in range(5)
    }  # fmt: skip
    assert len(chosen) == 25


@pytest.mark.parametrize("kind", [FifoSampler, UniformSampler, FreshnessSampler, PrioritySampler])
def test_groups_past_the_window_or_used_up_are_not_chosen(kind: type[Sampler]):
    used = [(Candidate(2, 0), 1), (Candidate(2, 1), 2), (Candidate(1, 2), 1), (Candidate(3, 3), 1)]
    question = StepRequest(groups=3, train_version=4, max_staleness=2)
    choice = choose(kind(max_reuse=2), [Candidate(4, 4)], used, (), question)
    assert sorted(choice.leases) == [0, 3, 4]


@pytest.mark.parametrize("kind", [UniformSampler, FreshnessSampler, PrioritySampler])
def test_random_strategies_await_groups_at_their_deadline_and_no_others(kind: type[Sampler]):
    stored = [Candidate(3, n) for n in range(4)]
    question = StepRequest(groups=2, train_version=3, max_staleness=2)
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
