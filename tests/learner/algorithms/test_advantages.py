from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from bus.trajectory import Trajectory
from learner.algorithms.advantages.group_baselines import (
    grpo_advantages,
    leave_one_out,
    over_mean,
    relative_rewards,
)
from tests.factories import make_trajectory


def group(*parts: tuple[int, str, float], **changes: object) -> list[Trajectory]:
    """Trajectories of these (rollout, agent, reward), and what else is to be different."""
    size = len(parts)
    return [
        replace(
            make_trajectory(0, n, group_size=size, reward=reward), rollout=rollout, agent=agent, **changes
        )
        for n, (rollout, agent, reward) in enumerate(parts)
    ]


def test_each_agent_is_compared_with_itself():
    solvers_and_critics = group(
        (0, "solver", 0.0), (0, "critic", 10.0), (1, "solver", 1.0), (1, "critic", 10.0)
    )
    # solvers: mean 0.5, population deviation 0.5; critics are all alike
    assert grpo_advantages([solvers_and_critics], normalize_std=True, std_floor=0.0) == [
        [-1.0, 0.0, 1.0, 0.0]
    ]


def test_trajectories_of_one_agent_in_one_episode_count_once_and_share_their_advantage():
    forked = group((0, "solver", 4.0), (0, "solver", 2.0), (0, "solver", 3.0), (1, "solver", 1.0))
    # episodes have 3 and 1: baseline 2, where the mean over trajectories would be 2.5
    assert grpo_advantages([forked], normalize_std=False, std_floor=0.0) == [[1.0, 1.0, 1.0, -1.0]]


def test_policies_have_baselines_of_their_own():
    one, other = group((0, "solver", 0.0), (1, "solver", 1.0)), group((2, "solver", 6.0), (3, "solver", 8.0))
    mixed = [*one, *(replace(t, policy="second") for t in other)]
    assert grpo_advantages([mixed], normalize_std=False, std_floor=0.0) == [[-0.5, 0.5, -1.0, 1.0]]


@pytest.mark.parametrize("changes", [{"trainable": False}, {"end": "timeout"}, {"end": "tool_error"}])
def test_what_is_not_trained_is_in_no_baseline(changes):
    found = group((0, "solver", 0.0), (1, "solver", 1.0), (2, "solver", 50.0))
    found[2] = replace(found[2], **changes)
    assert grpo_advantages([found], normalize_std=False, std_floor=0.0) == [[-0.5, 0.5, 0.0]]


@pytest.mark.parametrize("end", ["length", "turn_limit"])
def test_an_end_that_the_policy_brought_about_counts(end):
    found = group((0, "solver", 0.0), (1, "solver", 1.0), end=end)
    assert grpo_advantages([found], normalize_std=False, std_floor=0.0) == [[-0.5, 0.5]]


def test_grpo_by_hand():
    # mean 0.25, population standard deviation sqrt(3)/4
    advantages = relative_rewards(np.array([1.0, 0.0, 0.0, 0.0]), normalize_std=True, std_floor=0.0)
    assert advantages.dtype == np.float32
    assert advantages.tolist() == pytest.approx([3**0.5, *[-(3**-0.5)] * 3])


def test_the_floor_is_added_to_the_deviation():
    advantages = relative_rewards(np.array([1.0, -1.0]), normalize_std=True, std_floor=1.0)
    assert advantages.tolist() == [0.5, -0.5]


def test_without_normalization_only_the_mean_is_removed():
    assert relative_rewards(np.array([3.0, 1.0]), normalize_std=False, std_floor=1e-4).tolist() == [1.0, -1.0]


@pytest.mark.parametrize("rewards", [[0.7], [0.1, 0.1, 0.1]])
@pytest.mark.parametrize("std_floor", [0.0, 1e-4])
def test_a_group_without_variance_teaches_nothing(rewards, std_floor):
    advantages = relative_rewards(np.array(rewards), normalize_std=True, std_floor=std_floor)
    assert advantages.tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize(
    "relative", [partial(relative_rewards, normalize_std=True, std_floor=0.0), leave_one_out, over_mean]
)
def test_rewards_that_differ_by_rounding_have_no_advantages(relative):
    """Divided by a deviation that is rounding alone, they would have advantages of size 1."""
    for rewards in ([0.1 + 0.2, 0.3, 0.3], [float(np.float32(0.7)), 0.7], [0.7, 0.7 + 1e-8]):
        assert relative(np.array(rewards)).tolist() == [0.0] * len(rewards)
    assert abs(relative(np.array([0.3, 0.3 + 1e-5]))).min() > 0
