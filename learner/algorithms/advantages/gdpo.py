"""Several rewards, each compared by itself in the group before they are added."""

from collections.abc import Mapping
from functools import partial

import numpy as np

from bus.errors import ConfigError
from bus.trajectory import Groups, Trajectory
from learner.algorithms.advantages.grpo import relative_rewards
from learner.algorithms.advantages.peers import relative_to_peers
from learner.algorithms.advantages.whitening import whitened
from learner.distributed.exact_sums import SumsOverRanks


def gdpo_advantages(
    groups: Groups, *, rewards: Mapping[str, float], std_floor: float, sums: SumsOverRanks
) -> list[list[float | np.ndarray]]:
    """Normalise each reward in the group, add them by weight, and whiten the sum over the step.

    GDPO (arXiv:2601.05242): rewards that are added first let different combinations collapse into the same
    advantage. The last step is over the trajectories of all ranks, for each trained policy.

    Args:
        groups: trajectories of one prompt each. Those that are not trained are in no baseline and get 0.
        sums: adds up over ranks.

    Raises `ConfigError` for a trained trajectory that lacks one of the rewards.
    """
    relative = partial(relative_rewards, normalize_std=True, std_floor=std_floor)
    added: list[list[float]] = []
    for group in groups:
        parts = [
            [weight * (found or 0.0) for found in relative_to_peers(group, partial(_part, name), relative)]
            for name, weight in rewards.items()
        ]
        added.append([sum(of_trajectory) for of_trajectory in zip(*parts, strict=True)])
    return whitened(groups, added, sums, over="trajectories")


def _part(name: str, trajectory: Trajectory) -> float:
    if name not in trajectory.reward_components:
        there = ", ".join(sorted(trajectory.reward_components)) or "none"
        raise ConfigError(
            f"learner.advantage.rewards names {name!r}, and {trajectory.trajectory_id} has the reward "
            f"components {there}: have the environment or the reward return it, or name another"
        )
    return trajectory.reward_components[name]
