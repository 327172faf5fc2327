"""Rewards relative to those of the same agent in the other rollouts of the prompt."""

from collections.abc import Sequence

import numpy as np

from bus.trajectory import Groups, Trajectory, episode_rewards


def grpo_advantages(groups: Groups, *, normalize_std: bool, std_floor: float) -> list[list[float]]:
    """Compare each agent of an episode with itself in the other episodes of its group.

    The baseline is that of arXiv:2402.03300, eq. 3, with outcome rewards. Rewards of different agents are of
    different scales and for answers to different prompts, so each (policy, agent) has a baseline of its own
    (agent-wise groups, arXiv:2510.11062). Several trajectories of one agent in one episode count once, with
    their mean, and share the advantage: eq. 3 is over independent rollouts, and forks of one are not.

    Args:
        groups: trajectories of one prompt each. Those that are not trained are in no baseline and get 0.
        normalize_std: divide by the population standard deviation.
        std_floor: added to the standard deviation.

    Returns the advantage of each trajectory, the same at all its tokens.
    """
    return [_of_group(group, normalize_std=normalize_std, std_floor=std_floor) for group in groups]


def _of_group(group: Sequence[Trajectory], *, normalize_std: bool, std_floor: float) -> list[float]:
    advantages: dict[tuple[tuple[str, str], int], float] = {}
    trained = (trajectory.agent_reward for trajectory in group if trajectory.is_trained)
    for whose, episodes in episode_rewards(trained).items():
        relative = relative_rewards(
            np.array(list(episodes.values())), normalize_std=normalize_std, std_floor=std_floor
        )
        advantages |= {(whose, rollout): float(a) for rollout, a in zip(episodes, relative, strict=True)}
    return [advantages[(t.policy, t.agent), t.rollout] if t.is_trained else 0.0 for t in group]


def relative_rewards(rewards: np.ndarray, *, normalize_std: bool, std_floor: float) -> np.ndarray:
    """Reward less the mean, divided by the deviation if so wished.

    Args:
        rewards: [G], of one agent in the rollouts of one prompt.
        normalize_std: divide by the population standard deviation.
        std_floor: added to the standard deviation.

    Returns float32 [G]; all 0 when the rewards are equal or there is only one.
    """
    centred = np.asarray(rewards, np.float64) - np.mean(rewards, dtype=np.float64)
    if np.ptp(rewards) == 0:
        return np.zeros(len(centred), np.float32)
    if normalize_std:
        centred /= centred.std() + std_floor
    return centred.astype(np.float32)
