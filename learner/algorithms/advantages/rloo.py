"""Rewards relative to the mean of the other rollouts of the prompt."""

import numpy as np

from bus.agent_rewards import are_equal
from bus.trajectory import Groups
from learner.algorithms.advantages.peers import rewards_relative_to_peers


def rloo_advantages(groups: Groups) -> list[list[float]]:
    """Compare each rollout with the mean of the others (RLOO, arXiv:2402.14740), agent by agent.

    The baseline does not depend on the rollout itself, so the gradient is unbiased with any size of group."""
    return [rewards_relative_to_peers(group, leave_one_out) for group in groups]


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """Return each reward less the mean of the others, float64 [G]; 0 when there is only one.

    r_i - mean of the others = G / (G - 1) * (r_i - mean of all)."""
    if are_equal(rewards):
        return np.zeros(len(rewards))
    centred: np.ndarray = rewards - rewards.mean()
    return centred * len(rewards) / (len(rewards) - 1)
