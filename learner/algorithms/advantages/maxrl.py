"""Rewards relative to the mean of the prompt, in units of that mean."""

import numpy as np

from bus.agent_rewards import are_equal
from bus.errors import ConfigError
from bus.trajectory import Groups
from learner.algorithms.advantages.peers import rewards_relative_to_peers


def maxrl_advantages(groups: Groups) -> list[list[float]]:
    """Weigh a prompt by the inverse of its success rate (MaxRL, arXiv:2602.02710), agent by agent.

    With rewards of 0 and 1, (r - mean) / mean is the estimator of the gradient of log(success rate), the
    likelihood of a correct answer, up to the order that the size of the group allows.

    Raises `ConfigError` for a trained trajectory with a negative reward."""
    for trajectory in (t for group in groups for t in group if t.is_trained):
        if trajectory.reward < 0:
            raise ConfigError(
                f"learner.advantage.type=maxrl divides by the mean reward, and {trajectory.trajectory_id} "
                f"has {trajectory.reward}: it needs rewards of at least 0, such as 0 and 1; grpo takes any"
            )
    return [rewards_relative_to_peers(group, over_mean) for group in groups]


def over_mean(rewards: np.ndarray) -> np.ndarray:
    """Return (reward - mean) / mean, float64 [G]; 0 when the rewards are equal, as when all are 0."""
    if are_equal(rewards):
        return np.zeros(len(rewards))
    centred: np.ndarray = rewards - rewards.mean()
    relative: np.ndarray = centred / rewards.mean()
    return relative
