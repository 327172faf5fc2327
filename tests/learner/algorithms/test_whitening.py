"""Advantages normalised over everything that a step trains on, however its groups are divided over ranks."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from bus.trajectory import Groups, Trajectory
from learner.algorithms.advantages.reinforce_pp import (
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
)
from learner.algorithms.advantages.whitening import whitened
from learner.distributed.exact_sums import exact_sums, joined
from tests.learner.algorithms.rewarded import group
from tests.learner.algorithms.virtual_ranks import Ranks


def drawn(groups: int, seed: int = 0) -> list:
    """Groups of unequal sizes, lengths and rewards, some of which are those of another policy."""
    draw = np.random.default_rng(seed)
    return [
        group(
            *draw.normal(3, 2, int(draw.integers(1, 5))).tolist(),
            lease=n,
            tokens=int(draw.integers(4, 30)),
            policy=("default", "default", "second")[n % 3],
        )
        for n in range(groups)
    ]


def penalties(groups: Groups) -> list:
    """What each token loses, the same of a trajectory whatever others are with it."""
    return [[_drawn_for(t) for t in each] for each in groups]


def _drawn_for(trajectory: Trajectory) -> np.ndarray:
    draw = np.random.default_rng([5, trajectory.lease_id, trajectory.sample])
    return draw.normal(0, 0.3, len(trajectory.token_ids))


def zero(groups: Groups) -> list[list[float]]:
    return [[0.0] * len(each) for each in groups]


def flat(groups: Groups, advantages, policy: str) -> np.ndarray:
    """The advantages of a policy's trained tokens, end to end."""
    return np.concatenate([
        np.broadcast_to(advantage, len(t.token_ids))[t.loss_mask]
        for each, found in zip(groups, advantages, strict=True)
        for t, advantage in zip(each, found, strict=True)
        if t.policy == policy and t.is_trained
    ])  # fmt: skip


@pytest.mark.parametrize("policy", ["default", "second"])
def test_each_policys_tokens_have_mean_0_and_variance_1(policy):
    groups = drawn(9)
    found = flat(groups, whitened(groups, penalties(groups), exact_sums, over="tokens"), policy)
    before = flat(groups, penalties(groups), policy)
    expected = (before - before.mean()) / np.sqrt(before.var(ddof=1) + 1e-8)
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert (found.mean(), found.std(ddof=1)) == (pytest.approx(0, abs=1e-12), pytest.approx(1, rel=1e-6))


def test_whitening_by_hand():
    # 4 tokens of 1 and 4 of 3: mean 2, variance of the sample 8/7
    groups = [group(0.0, 0.0)]
    found = whitened(groups, [[1.0, 3.0]], exact_sums, over="tokens")
    assert found == [pytest.approx([-((7 / 8) ** 0.5), (7 / 8) ** 0.5], rel=1e-7)]
    # each trajectory once: variance 2
    found = whitened(groups, [[1.0, 3.0]], exact_sums, over="trajectories")
    assert found == [pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-7)]


def test_tokens_that_are_not_trained_count_nowhere_and_get_0():
    one, other, broken = group(0.0, 0.0, 0.0)
    mask = one.loss_mask.copy()
    mask[0] = True  # nothing predicts the first token
    groups = [[replace(one, loss_mask=mask), other, replace(broken, end="timeout")]]
    advantages = [np.where(one.loss_mask, value, np.nan) for value in (1.0, 3.0, np.nan)]
    [found] = whitened(groups, [advantages], exact_sums, over="tokens")
    root = (7 / 8) ** 0.5
    assert found[0] == pytest.approx(np.where(one.loss_mask, -root, 0.0), rel=1e-7)
    assert found[1] == pytest.approx(np.where(one.loss_mask, root, 0.0), rel=1e-7)
    assert found[2] == 0.0


@pytest.mark.parametrize("value", [0.0, 0.1, -3.3, 1e30])
def test_advantages_that_are_all_the_same_teach_nothing(value):
    groups = drawn(7)
    same = [[value] * len(each) for each in groups]
    assert whitened(groups, same, exact_sums, over="tokens") == [[0.0] * len(each) for each in groups]
    assert whitened([group(1.0)], [[value]], exact_sums, over="trajectories") == [[0.0]]
    assert whitened([], [], exact_sums, over="tokens") == []


def test_large_advantages_that_differ_little_lose_no_digits():
    groups = [group(*[0.0] * 4)]
    found = whitened(groups, [[1e8, 1e8 + 1, 1e8 + 2, 1e8 + 3]], exact_sums, over="trajectories")
    small = whitened(groups, [[0.0, 1.0, 2.0, 3.0]], exact_sums, over="trajectories")
    assert found == [pytest.approx(small[0], rel=1e-12)]


OF_ALL_RANKS = {
    "whitened": lambda groups, sums: whitened(groups, penalties(groups), sums, over="tokens"),
    "reinforce_pp": lambda groups, sums: reinforce_pp_advantages(
        groups, discount_per_token=0.9, sums=sums, token_penalties=penalties(groups)
    ),
    "reinforce_pp_baseline": lambda groups, sums: reinforce_pp_baseline_advantages(
        groups, sums=sums, token_penalties=zero(groups)
    ),
}


@pytest.mark.parametrize("name", OF_ALL_RANKS)
@pytest.mark.parametrize("bounds", [[0, 4, 9], [0, 9, 9], [0, 0, 1, 2, 9]])
def test_no_division_over_ranks_changes_a_bit(name, bounds):
    groups, work = drawn(9), OF_ALL_RANKS[name]
    alone = work(groups, exact_sums)
    shares = [groups[start:stop] for start, stop in pairwise(bounds)]
    together = [each for share in Ranks(shares).run(work) for each in share]
    for expected, found in zip(alone, together, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))


def test_sums_are_rounded_once():
    rows = [(1e16, 1.0), (1.0, 0.1), (-1e16, 0.2), (1.0, -0.3)]
    assert exact_sums({"a": rows, "b": []})["a"].tolist() == [2.0, 1.0]
    assert joined([{"a": rows[:1]}, {}, {"a": rows[1:], "b": rows}]) == {"a": rows, "b": rows}


# --- REINFORCE++ ---


def undiscounted(groups: Groups, lost):
    return reinforce_pp_advantages(groups, discount_per_token=1.0, sums=exact_sums, token_penalties=lost)


def test_reinforce_pp_is_its_formula():
    """arXiv:2501.03262, eq. 8 to 10, written token by token."""
    groups = [group(1.0, 0.0), group(0.5, 0.25, lease=1, tokens=14)]
    lost = penalties(groups)
    found = undiscounted(groups, lost)
    returns = []
    for each, of_group in zip(groups, lost, strict=True):
        for trajectory, of_tokens in zip(each, of_group, strict=True):
            places = np.flatnonzero(trajectory.loss_mask)
            returns += [trajectory.reward - sum(of_tokens[i] for i in places[n:]) for n in range(len(places))]
    returns = np.array(returns)
    expected = (returns - returns.mean()) / np.sqrt(returns.var(ddof=1) + 1e-8)
    assert flat(groups, found, "default") == pytest.approx(expected, rel=1e-10, abs=1e-12)


def test_reinforce_pp_by_hand():
    # two trained tokens with a reward of 1 and a penalty of 0.5 each: returns 0 and 0.5, then discounted
    [[one]] = undiscounted([group(1.0, tokens=4)], [[0.5]])
    assert one == pytest.approx([0.0, 0.0, -(0.5**0.5), 0.5**0.5], rel=1e-6)
    # returns of 1 and 0.5, and of 0 and 0: mean 3/8, squares 25 + 1 + 9 + 9 = 44 of 64ths, over 3
    [found] = reinforce_pp_advantages(
        [group(1.0, 0.0, tokens=4)], discount_per_token=0.5, sums=exact_sums, token_penalties=[[0.0, 0.0]]
    )
    deviation = (44 / 64 / 3) ** 0.5
    assert found[0] == pytest.approx(np.array([0.0, 0.0, 1 / 8, 5 / 8]) / deviation, rel=1e-6)
    assert found[1] == pytest.approx(np.array([0.0, 0.0, -3 / 8, -3 / 8]) / deviation, rel=1e-6)


def test_without_penalties_and_discount_it_is_the_whitened_reward():
    groups = drawn(9)
    rewards = [[t.reward for t in each] for each in groups]
    expected = whitened(groups, rewards, exact_sums, over="tokens")
    found = undiscounted(groups, zero(groups))
    assert found == expected


def test_neither_form_sees_a_shift_or_a_scale_of_all_rewards():
    groups = drawn(9)
    moved = [[replace(t, reward=4 * t.reward + 64) for t in each] for each in groups]
    for work in (
        lambda own: undiscounted(own, zero(own)),
        lambda own: reinforce_pp_baseline_advantages(own, sums=exact_sums, token_penalties=zero(own)),
    ):
        for expected, found in zip(work(groups), work(moved), strict=True):
            assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_the_baseline_form_is_its_formula():
    groups = [group(1.0, 0.0, 0.5), group(5.0, 7.0, lease=1, tokens=14)]
    lost = penalties(groups)
    found = reinforce_pp_baseline_advantages(groups, sums=exact_sums, token_penalties=lost)
    values = np.concatenate([
        (t.reward - np.mean([other.reward for other in each]) - of_tokens)[t.loss_mask]
        for each, of_group in zip(groups, lost, strict=True)
        for t, of_tokens in zip(each, of_group, strict=True)
    ])  # fmt: skip
    expected = (values - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8)
    assert flat(groups, found, "default") == pytest.approx(expected, rel=1e-10, abs=1e-12)
