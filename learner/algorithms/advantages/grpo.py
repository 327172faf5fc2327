"""Rewards relative to those of the same agent in the other rollouts of the prompt."""

from functools import partial

import numpy as np

from bus.agent_rewards import are_equal
from bus.trajectory import Groups
from learner.algorithms.advantages.peers import rewards_relative_to_peers


def grpo_advantages(groups: Groups, *, normalize_std: bool, std_floor: float) -> list[list[float]]:
    """Compare each agent of an episode with itself in the other episodes of its group.

    The baseline is that of arXiv:2402.03300, eq. 3, with outcome rewards, for each agent
    (`learner.algorithms.advantages.peers.rollouts_of_agent`). Without the division it is that of Dr. GRPO
    (arXiv:2503.20783), which also divides the loss by a constant.

    Args:
        groups: trajectories of one prompt each. Those that are not trained are in no baseline and get 0.
        normalize_std: divide by the population standard deviation.
        std_floor: added to the standard deviation.

    Returns the advantage of each trajectory, the same at all its tokens.
    """
    relative = partial(relative_rewards, normalize_std=normalize_std, std_floor=std_floor)
    return [rewards_relative_to_peers(group, relative) for group in groups]


def relative_rewards(rewards: np.ndarray, *, normalize_std: bool, std_floor: float) -> np.ndarray:
    """Reward less the mean, divided by the deviation if so wished.

    Args:
        rewards: [G], of one agent in the rollouts of one prompt.
        normalize_std: divide by the population standard deviation.
        std_floor: added to the standard deviation.

    Returns float32 [G]; all 0 when the rewards are equal, but for rounding, or there is only one.
    """
    centred = np.asarray(rewards, np.float64) - np.mean(rewards, dtype=np.float64)
    if are_equal(rewards):
        return np.zeros(len(centred), np.float32)
    if normalize_std:
        centred /= centred.std() + std_floor
    return centred.astype(np.float32)
