"""Learning rate of each update."""

import math

from learner.config.optimizer import ConstantSchedule, CosineSchedule, OptimizerConfig


def learning_rate(config: OptimizerConfig, update: int) -> float:
    """Return the learning rate of an update, counted from 1: first up to `lr`, then as the schedule says.

    Update u of w warm-up updates runs at lr * u / w; the schedule counts from the last of them.
    """
    if update <= config.warmup_steps:
        return config.lr * update / config.warmup_steps
    schedule = config.schedule
    if isinstance(schedule, ConstantSchedule):
        return config.lr
    elapsed = update - max(config.warmup_steps, 1)
    if isinstance(schedule, CosineSchedule):
        left = (1 + math.cos(math.pi * min(1.0, elapsed / schedule.decay_steps))) / 2
    else:  # arXiv:2404.06395, arXiv:2405.18392
        decayed = min(1.0, max(0, elapsed - schedule.stable_steps) / schedule.decay_steps)
        left = 1 - (decayed if schedule.decay == "linear" else math.sqrt(decayed))
    return schedule.min_lr + (config.lr - schedule.min_lr) * left
