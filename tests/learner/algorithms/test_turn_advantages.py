"""Advantages of turns: discounted returns and turn credit."""

from dataclasses import replace

import numpy as np
import pytest

from bus.errors import ConfigError
from learner.algorithms.advantages.group_baselines import grpo_advantages
from learner.algorithms.advantages.step_advantages import estimate_advantages
from learner.algorithms.advantages.turns import discounted_return_advantages, turn_credit_advantages
from learner.config.advantage import DiscountedReturns, TurnCredit
from tests.learner.algorithms.rewarded import group, with_turns


def rollouts(*turns: tuple[float | None, ...], outcomes=None, **changes):
    """A rollout for each tuple of rewards of turns."""
    made = group(*(outcomes or [0.0] * len(turns)), **changes)
    return [with_turns(trajectory, *rewards) for trajectory, rewards in zip(made, turns, strict=True)]


def of_turns(groups, found) -> list[list[float]]:
    """The advantages of the turns of a group's trajectories; those of other tokens must be 0."""
    values = []
    for trajectory, advantage in zip(groups[0], found[0], strict=True):
        assert advantage.shape == trajectory.token_ids.shape
        assert not advantage[~trajectory.loss_mask].any()
        of_trajectory = [advantage[turn.start : turn.stop].tolist() for turn in trajectory.turns]
        assert all(len(set(of_tokens)) == 1 for of_tokens in of_trajectory)
        values.append([of_tokens[0] for of_tokens in of_trajectory])
    return values


def returns(groups, discount=1.0, **settings):
    settings = {"baseline": "none", "normalize_std": False, "std_floor": 0.0} | settings
    found = discounted_return_advantages(groups, discount_per_turn=discount, **settings)
    return of_turns(groups, found)


def credit(groups, outcome_coef=1.0, normalize_std=False, std_floor=0.0):
    found = turn_credit_advantages(
        groups, outcome_coef=outcome_coef, normalize_std=normalize_std, std_floor=std_floor
    )
    return of_turns(groups, found)


def test_returns_by_hand():
    groups = [rollouts((1.0, None, 2.0), (None, 4.0), outcomes=[8.0, 16.0])]
    # 1 + 0/2 + (2 + 8)/4, 0 + (2 + 8)/2, 2 + 8; 0 + (4 + 16)/2, 4 + 16
    assert returns(groups, discount=0.5) == [[3.5, 5.0, 10.0], [10.0, 20.0]]
    assert returns(groups) == [[11.0, 10.0, 10.0], [20.0, 20.0]]


def test_returns_are_compared_turn_by_turn():
    groups = [rollouts((1.0, None, 2.0), (None, 4.0), outcomes=[8.0, 16.0])]
    # 11 and 20, 10 and 20; the third turn has no other to be compared with
    assert returns(groups, baseline="turn") == [[-4.5, -5.0, 0.0], [4.5, 5.0]]
    assert returns(groups, baseline="turn", normalize_std=True) == [[-1.0, -1.0, 0.0], [1.0, 1.0]]


def test_returns_are_the_sum_of_the_definition():
    draw = np.random.default_rng(2)
    rewards, discount = draw.normal(size=(6, 5)), 0.7
    outcomes = draw.normal(size=6)
    groups = [rollouts(*map(tuple, rewards.tolist()), outcomes=outcomes.tolist())]
    whole = rewards + np.outer(outcomes, np.arange(5) == 4)
    expected = np.array([
        [sum(discount ** (j - k) * whole[i, j] for j in range(k, 5)) for k in range(5)] for i in range(6)
    ])  # fmt: skip
    assert returns(groups, discount) == [pytest.approx(row) for row in expected.tolist()]
    relative = (expected - expected.mean(0)) / (expected.std(0) + 0.25)
    found = returns(groups, discount, baseline="turn", normalize_std=True, std_floor=0.25)
    assert found == [pytest.approx(row, rel=1e-6) for row in relative.tolist()]


@pytest.mark.parametrize("normalize_std", [False, True])
def test_without_rewards_of_turns_all_of_them_are_grpo(normalize_std):
    groups = [rollouts((None, None), (None, None), (None,), outcomes=[1.0, 0.0, 0.5])]
    [expected] = grpo_advantages(groups, normalize_std=normalize_std, std_floor=0.1)
    per_turn = [[value] * len(t.turns) for value, t in zip(expected, groups[0], strict=True)]
    assert credit(groups, 0.3, normalize_std, 0.1) == [pytest.approx(values) for values in per_turn]
    same = [rollouts((None, None), (None, None), (None, None), outcomes=[1.0, 0.0, 0.5])]
    found = returns(same, baseline="turn", normalize_std=normalize_std, std_floor=0.1)
    assert found == [[value] * 2 for value in expected]


def test_credit_by_hand():
    """The two turns of arXiv:2505.11821: a search that is rewarded, and the answer."""
    groups = [rollouts((1.0, None), (0.0, None), (0.5, None), outcomes=[0.0, 1.0, 0.5])]
    # searches: 0.5, -0.5, 0; outcomes: -0.5, 0.5, 0
    assert credit(groups, outcome_coef=0.5) == [[0.25, -0.5], [-0.25, 0.5], [0.0, 0.0]]
    assert credit(groups, outcome_coef=0.0) == [[0.5, -0.5], [-0.5, 0.5], [0.0, 0.0]]


def test_only_turns_that_have_a_reward_are_compared():
    groups = [rollouts((1.0, 3.0), (0.0, None), (None, 1.0))]
    assert credit(groups) == [[0.5, 1.0], [-0.5, 0.0], [0.0, -1.0]]


def test_turns_of_forks_of_one_rollout_count_once():
    made = rollouts((4.0,), (2.0,), (1.0,))
    forked = [replace(t, rollout=rollout) for t, rollout in zip(made, (0, 0, 1), strict=True)]
    assert credit([forked]) == [[1.0], [1.0], [-1.0]]  # of 3 and 1, where each by itself would be of 7 / 3


def test_agents_turns_are_not_compared_with_each_other():
    made = rollouts((4.0,), (2.0,), (9.0,), (9.0,))
    agents = ["solver", "solver", "critic", "critic"]
    groups = [[replace(t, agent=agent) for t, agent in zip(made, agents, strict=True)]]
    assert credit(groups) == [[1.0], [-1.0], [0.0], [0.0]]


@pytest.mark.parametrize("config", [TurnCredit(), DiscountedReturns()])
def test_what_is_not_trained_is_in_no_baseline(config):
    made = rollouts((4.0, 1.0), (2.0, 1.0), (50.0, 9.0), outcomes=[1.0, 0.0, 7.0])
    made[2] = replace(made[2], end="tool_error")
    [found] = estimate_advantages(config, [made])
    [alone] = estimate_advantages(config, [made[:2]])
    assert found[2] == 0.0
    assert all(np.array_equal(a, b) for a, b in zip(found[:2], alone, strict=True))
    assert estimate_advantages(config, []) == []


def test_an_advantage_beyond_float32_is_refused_by_name():
    largest = float(np.finfo(np.float32).max)
    made = rollouts((largest, largest), (0.0, 0.0))
    with pytest.raises(ConfigError, match=r"g00000000\.0 is up to 6\.8\d*e\+38, beyond float32"):
        estimate_advantages(DiscountedReturns(baseline="none"), [made])
