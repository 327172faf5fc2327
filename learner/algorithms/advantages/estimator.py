"""The advantage estimator that a configuration names: built in, or the user's own function."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from bus.errors import ConfigError
from bus.trajectory import Groups, Trajectory
from learner.algorithms.advantages.grpo import grpo_advantages
from learner.algorithms.plugin import chosen_function
from learner.config.algorithm import AdvantageConfig

Advantage = float | NDArray[np.float32]
"""A trajectory's advantage: one for all its tokens, or [L]."""
Estimator = Callable[[Groups], Sequence[Sequence[Advantage]]]
"""An estimator takes this rank's groups, in which all trajectories of a prompt are together, trained or not,
with episodes, agents, turns and rewards. It returns an advantage for each trajectory; those of what is not
trained are ignored."""
ESTIMATORS: dict[str, Callable[..., Sequence[Sequence[Advantage]]]] = {"grpo": grpo_advantages}
"""Estimators by the `type` of the configuration. Each takes groups and its settings."""


def advantage_estimator(config: AdvantageConfig) -> Estimator:
    """Return the configured estimator. Raises `ConfigError` for a user's function that cannot be loaded."""
    return chosen_function("advantage", config, ESTIMATORS)


def estimate_advantages(config: AdvantageConfig, groups: Groups) -> list[list[Advantage]]:
    """Advantages of each group's trajectories. Raises `ConfigError` when a user's function misfits."""
    found = [list(group) for group in advantage_estimator(config)(groups)]
    if [len(group) for group in found] != [len(group) for group in groups]:
        raise ConfigError(
            f"advantage {config.type}: it returned {[len(group) for group in found]} advantages for groups "
            f"of {[len(group) for group in groups]} trajectories: return one for each"
        )
    for group, advantages in zip(groups, found, strict=True):
        for trajectory, advantage in zip(group, advantages, strict=True):
            if trajectory.is_trained:
                _refuse_misfit(trajectory, advantage)
    return found


def _refuse_misfit(trajectory: Trajectory, advantage: Advantage) -> None:
    values, length = np.asarray(advantage), len(trajectory.token_ids)
    if values.shape not in ((), (length,)) or not np.isfinite(values).all():
        raise ConfigError(
            f"the advantage of {trajectory.trajectory_id} has shape {list(values.shape)} and "
            f"{'finite' if np.isfinite(values).all() else 'non-finite'} values: it is to be a finite number, "
            f"or {length} of them, one for each token"
        )
