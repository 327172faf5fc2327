import numpy as np
import pytest

from learner.algorithms.advantages.grpo import grpo_advantages


def test_grpo_by_hand():
    # mean 0.25, population standard deviation sqrt(3)/4
    advantages = grpo_advantages(np.array([1.0, 0.0, 0.0, 0.0]), normalize_std=True, std_floor=0.0)
    assert advantages.dtype == np.float32
    assert advantages.tolist() == pytest.approx([3**0.5, *[-(3**-0.5)] * 3])


def test_the_floor_is_added_to_the_deviation():
    advantages = grpo_advantages(np.array([1.0, -1.0]), normalize_std=True, std_floor=1.0)
    assert advantages.tolist() == [0.5, -0.5]


def test_without_normalization_only_the_mean_is_removed():
    assert grpo_advantages(np.array([3.0, 1.0]), normalize_std=False, std_floor=1e-4).tolist() == [1.0, -1.0]


@pytest.mark.parametrize("rewards", [[0.7], [0.1, 0.1, 0.1]])
@pytest.mark.parametrize("std_floor", [0.0, 1e-4])
def test_a_group_without_variance_teaches_nothing(rewards, std_floor):
    advantages = grpo_advantages(np.array(rewards), normalize_std=True, std_floor=std_floor)
    assert advantages.tolist() == [0.0] * len(rewards)
