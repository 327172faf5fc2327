"""Rewards less the value that the best policy near the sampling one would have."""

from functools import partial

import numpy as np

from bus.trajectory import Groups
from learner.algorithms.advantages.peers import rewards_relative_to_peers


def oapl_advantages(groups: Groups, *, value_kl_weight: float) -> list[list[float]]:
    """Compare each rollout with the optimal value of its prompt (OAPL, arXiv:2602.19362, eq. 3), agent by
    agent.

    The policy that maximises reward less b KL(policy || sampling policy) has the value b log E exp(reward /
    b) under the sampling policy; the mean over the group estimates it, with b = `value_kl_weight`.
    """
    return [
        rewards_relative_to_peers(group, partial(less_optimal_value, value_kl_weight=value_kl_weight))
        for group in groups
    ]


def less_optimal_value(rewards: np.ndarray, *, value_kl_weight: float) -> np.ndarray:
    """Return each reward less b log mean exp(reward / b), float64 [G]; 0 where all are equal."""
    scaled = rewards / value_kl_weight
    largest = scaled.max()  # the exponentials stay at most 1
    value = value_kl_weight * (largest + np.log(np.exp(scaled - largest).mean()))
    less: np.ndarray = rewards - value
    return less
