"""RLOO, MaxRL, Dr. GRPO, GDPO and hierarchical baselines: each from the rewards of a prompt's rollouts."""

from dataclasses import replace
from fractions import Fraction
from statistics import fmean, pstdev, stdev

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from bus.errors import ConfigError
from bus.trajectory import Parent
from learner.algorithms.advantages.group_baselines import (
    gdpo_advantages,
    hierarchical_advantages,
    maxrl_advantages,
    rloo_advantages,
)
from learner.algorithms.advantages.step_advantages import estimate_advantages
from learner.config.advantage import (
    GDPOAdvantage,
    GRPOAdvantage,
    HierarchicalAdvantage,
    MaxRLAdvantage,
    RLOOAdvantage,
)
from learner.config.algorithm import ConstantDenominator
from learner.config.learner import LearnerConfig
from learner.distributed.exact_sums import exact_sums
from tests.learner.algorithms.rewarded import group

OF_GROUPS = {
    "grpo": GRPOAdvantage(std_floor=0.0),
    "dr_grpo": GRPOAdvantage(normalize_std=False),
    "rloo": RLOOAdvantage(),
    "maxrl": MaxRLAdvantage(),
    "hierarchical": HierarchicalAdvantage(within_episode=("critic",), normalize_std=False),
}
SHIFTS = {"grpo", "dr_grpo", "rloo", "hierarchical"}
"""Estimators that a constant added to all rewards does not change."""
SCALES = {"grpo": 0, "dr_grpo": 1, "rloo": 1, "maxrl": 0, "hierarchical": 1}
"""Powers of a factor of all rewards that the advantages have."""
REWARDS = st.lists(st.integers(0, 8).map(lambda n: n / 4), min_size=1, max_size=9)


def of_one(name: str, rewards) -> list[float]:
    [found] = estimate_advantages(OF_GROUPS[name], [group(*rewards)])
    return found


def formula(name: str, rewards: list[float]) -> list[float]:
    """The definitions, in exact arithmetic as far as roots allow."""
    exact = [Fraction(reward) for reward in rewards]
    mean, n = sum(exact) / len(exact), len(exact)
    if len(set(exact)) == 1:
        return [0.0] * n
    match name:
        case "grpo":
            return [float(r - mean) / pstdev(rewards) for r in exact]
        case "rloo":
            return [float(r - (sum(exact) - r) / (n - 1)) for r in exact]
        case "maxrl":
            return [float((r - mean) / mean) for r in exact]
    return [float(r - mean) for r in exact]


@pytest.mark.first(2, others=pytest.mark.slow)
@pytest.mark.parametrize("name", OF_GROUPS)
@settings(max_examples=50)
@given(rewards=REWARDS)
def test_each_is_its_definition_at_any_size_of_group(name, rewards):
    assert of_one(name, rewards) == pytest.approx(formula(name, rewards), rel=2e-7, abs=1e-7)


@pytest.mark.parametrize("name", OF_GROUPS)
def test_a_group_of_one_and_a_constant_group_teach_nothing(name):
    assert of_one(name, [0.7]) == [0.0]
    assert of_one(name, [0.1] * 7) == [0.0] * 7
    assert of_one(name, [0.0] * 3) == [0.0] * 3
    assert estimate_advantages(OF_GROUPS[name], []) == []


@pytest.mark.first(2, others=pytest.mark.slow)
@pytest.mark.parametrize("name", OF_GROUPS)
@settings(max_examples=50)
@given(rewards=REWARDS, seed=st.integers(0, 99))
def test_the_order_of_the_rollouts_does_not_matter(name, rewards, seed):
    order = np.random.default_rng(seed).permutation(len(rewards))
    found = of_one(name, rewards)
    assert of_one(name, [rewards[i] for i in order]) == pytest.approx([found[i] for i in order], abs=1e-6)


@pytest.mark.parametrize("name", OF_GROUPS)
def test_shifted_and_scaled_rewards(name):
    rewards = [0.0, 1.0, 0.25, 1.0]
    found = np.array(of_one(name, rewards))
    if name in SHIFTS:
        assert of_one(name, [reward + 16 for reward in rewards]) == pytest.approx(found, rel=1e-6)
    scaled = of_one(name, [reward * 8 for reward in rewards])
    assert scaled == pytest.approx(found * 8.0 ** SCALES[name], rel=1e-6)


def test_rloo_by_hand():
    # others' means: 0, 1/3, 1/3, 1/3
    assert rloo_advantages([group(1.0, 0.0, 0.0, 0.0)]) == [pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])]


def test_rloo_is_dr_grpo_but_for_a_factor_that_a_large_group_loses():
    rewards = np.random.default_rng(1).random(1000)
    ratio = np.array(of_one("rloo", rewards)) / np.array(of_one("dr_grpo", rewards))
    assert ratio == pytest.approx(1000 / 999, rel=1e-5)


def test_maxrl_by_hand():
    # mean 1/4: an answer that one in four gets weighs 3, and the failures together as much
    assert maxrl_advantages([group(1.0, 0.0, 0.0, 0.0)]) == [[3.0, -1.0, -1.0, -1.0]]


def test_maxrl_of_successes_is_the_mean_gradient_of_their_likelihood():
    """Sum over the group of A_i grad_i / G is the mean of the successes' gradients less that of all."""
    rewards, gradients = np.array([1.0, 0.0, 1.0, 0.0, 0.0]), np.array([2.0, 3.0, 5.0, 7.0, 11.0])
    found = float((np.array(of_one("maxrl", rewards)) * gradients).mean())
    assert found == pytest.approx(gradients[rewards == 1].mean() - gradients.mean())


def test_maxrl_refuses_a_negative_reward_by_name():
    with pytest.raises(ConfigError, match=r"g00000000\.1 has -0\.5: it needs rewards of at least 0"):
        maxrl_advantages([group(1.0, -0.5)])
    untrained = group(1.0, 0.0, -9.0)
    untrained[2] = replace(untrained[2], end="tool_error")
    assert maxrl_advantages([untrained]) == [[1.0, -1.0, 0.0]]


def test_dr_grpo_is_two_settings():
    """arXiv:2503.20783: no division by the deviation, none by the length of the answer."""
    learner = LearnerConfig(advantage=OF_GROUPS["dr_grpo"], aggregation=ConstantDenominator(tokens=100))
    [found] = estimate_advantages(learner.advantage, [group(3.0, 1.0, 2.0)])
    assert found == [1.0, -1.0, 0.0]


# --- several rewards ---


def parts(*values: tuple[float, float], lease: int = 0):
    """Rollouts with these (correct, format)."""
    return [
        replace(trajectory, reward_components={"correct": correct, "format": form})
        for trajectory, (correct, form) in zip(group(*[0.0] * len(values), lease=lease), values, strict=True)
    ]


def gdpo(groups, std_floor=0.0, **weights):
    return gdpo_advantages(groups, rewards=weights, std_floor=std_floor, sums=exact_sums)


def test_gdpo_by_hand():
    # both normalised: -1, 1 and 1, -1; weighed 2 and 1: -1, 1; the deviation of a sample of -1, 1 is sqrt(2)
    found = gdpo([parts((0.0, 10.0), (1.0, 0.0))], correct=2.0, format=1.0)
    assert found == [pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-8)]


def test_gdpo_keeps_apart_what_a_sum_of_rewards_does_not():
    """arXiv:2601.05242, section 2: totals of 1 and 2 differ by as much as 0 and 1 do in a group of two."""
    one, both = parts((0.0, 0.0), (1.0, 0.0)), parts((0.0, 0.0), (1.0, 1.0), lease=1)
    for each in (one, both):
        summed = [replace(t, reward=sum(t.reward_components.values())) for t in each]
        assert estimate_advantages(GRPOAdvantage(std_floor=0.0), [summed]) == [[-1.0, 1.0]]
    found = gdpo([one, both], correct=1.0, format=1.0)
    assert found[1][1] == pytest.approx(2 * found[0][1], rel=1e-8)


def test_gdpo_is_its_formula_over_all_groups():
    draw = np.random.default_rng(3)
    groups = [parts(*draw.random((4, 2)).tolist(), lease=n) for n in range(5)]
    sums = []
    for each in groups:
        for trajectory in each:
            total = 0.0
            for name, weight in {"correct": 1.0, "format": 0.3}.items():
                values = [t.reward_components[name] for t in each]
                centred = trajectory.reward_components[name] - fmean(values)
                total += weight * centred / (pstdev(values) + 0.01)
            sums.append(total)
    expected = [(value - fmean(sums)) / (stdev(sums) ** 2 + 1e-8) ** 0.5 for value in sums]
    found = gdpo(groups, std_floor=0.01, correct=1.0, format=0.3)
    assert [value for each in found for value in each] == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_gdpo_names_what_is_missing():
    lacking = parts((0.0, 1.0), (1.0, 0.0))
    lacking[1] = replace(lacking[1], reward_components={"format": 1.0})
    with pytest.raises(ConfigError, match=r"'correct', and g00000000\.1 has the reward components format"):
        gdpo([lacking], correct=1.0)
    lacking[1] = replace(lacking[1], trainable=False)
    assert gdpo([lacking], correct=1.0) == [[0.0, 0.0]]
    with pytest.raises(ValidationError, match="at least 1 item"):
        GDPOAdvantage(rewards={})


# --- within the episode ---


def proposals():
    """Two problems posed in a group; the solver tries each twice, and the first attempt forks once."""
    rewards = (0.4, 1.0, 0.0, 0.5, 0.8, 1.0, 3.0)
    agents = ("poser", "solver", "solver", "solver", "poser", "solver", "solver")
    found = [
        replace(trajectory, agent=agent, rollout=int(n >= 4))
        for n, (trajectory, agent) in enumerate(zip(group(*rewards), agents, strict=True))
    ]
    found[2] = replace(found[2], parent=Parent(found[1].trajectory_id, 4))
    return found


def test_attempts_are_compared_within_their_episode_and_posers_with_each_other():
    # episode 0: attempts 0.5 (1.0 and its fork 0.0) and 0.5; episode 1: attempts 1 and 3; posers 0.4 and 0.8
    [found] = hierarchical_advantages(
        [proposals()], within_episode=["solver"], normalize_std=False, std_floor=0.0
    )
    assert found == pytest.approx([-0.2, 0.0, 0.0, 0.0, 0.2, -1.0, 1.0])


def test_what_was_forked_from_another_agent_is_an_attempt_of_its_own():
    forked = proposals()
    for n in (2, 3):
        forked[n] = replace(forked[n], parent=Parent(forked[0].trajectory_id, 4))
    [found] = hierarchical_advantages([forked], within_episode=["solver"], normalize_std=True, std_floor=0.0)
    # attempts of 1, 0 and 0.5: population deviation 1 / sqrt(6)
    assert found[1:4] == pytest.approx([1.5**0.5, -(1.5**0.5), 0.0])


def test_without_agents_within_episodes_it_is_grpo():
    found = hierarchical_advantages([proposals()], within_episode=["x"], normalize_std=True, std_floor=0.1)
    assert found == estimate_advantages(GRPOAdvantage(std_floor=0.1), [proposals()])


# --- settings ---


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"advantage": {"type": "gdpo", "rewards": {"a": 1.0}}, "whiten_advantages": True}, "no effect"),
        (
            {"advantage": {"type": "gdpo", "rewards": {"a": 1.0}}, "overlong": {"longest_tokens": 9}},
            r"rewards\.overlong_penalty=1\.0",
        ),
        (
            {
                "advantage": {"type": "gdpo", "rewards": {"a": 1.0}},
                "reference": {"kl_coef": 0.1, "kl_in": "reward"},
            },
            "takes the parts of the reward one by one",
        ),
        ({"advantage": {"type": "maxrl"}, "overlong": {"longest_tokens": 9}}, "may make them negative"),
        (
            {"advantage": {"type": "maxrl"}, "reference": {"kl_coef": 0.1, "kl_in": "reward"}},
            "may make them negative",
        ),
        ({"overlong": {"longest_tokens": 9, "margin_tokens": 10}}, "margin_tokens=10 is beyond"),
        ({"overlong": {"margin_tokens": 10}}, "longest_tokens=None"),
        ({"advantage": {"type": "rae", "decay": 1.0}}, "less than 1"),
    ],
)
def test_settings_without_effect_or_sense_are_refused(values, reason):
    with pytest.raises(ValidationError, match=reason):
        LearnerConfig.model_validate(values)
