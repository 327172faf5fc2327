"""Decides of one update whether it counts and how far its gradient is clipped, whatever backend trains."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bus.errors import TrainingError
from learner.config.optimizer import ConstantSchedule, CosineSchedule, OptimizerConfig


def learning_rate(config: OptimizerConfig, update: int) -> float:
    """Return the learning rate of an update, counted from 1: first up to `lr`, then as the schedule says.
    Update u of w warm-up updates runs at lr * u / w; the schedule counts from the last of them."""
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


CLIP_EPS = 1e-6
"""Added to the gradient norm before clipping, as in torch."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Says what becomes of a gradient; the device computes it, and the host does not wait."""

    norm: Tensor
    """[], norm of the gradient of the mean loss, before clipping."""
    divisor: Tensor
    """float32 [], what the gradient of the sum of all losses is divided by."""
    skip: Tensor
    """float32 [], 1 to leave weights, moments and step counts as they are, else 0."""


def decide(loss: Tensor, tokens: Tensor, denominator: Tensor, norm: Tensor, clip_grad: float) -> Decision:
    """Clip the gradient, and skip the update if there is no token, or if loss or gradient is not finite.

    Args:
        loss: float64 [], sum over all ranks.
        tokens: float64 [], trained tokens of all ranks.
        denominator: float64 [], what the sum of the losses is divided by.
        norm: float32 [], of the gradient of the sum of the losses.
        clip_grad: upper bound on the norm of the gradient that is used."""
    divisor = torch.where(denominator > 0, denominator, 1.0)
    norm = norm / divisor
    clipped = ((norm + CLIP_EPS) / clip_grad).clamp(min=1)
    updated = (tokens > 0) & torch.isfinite(loss) & torch.isfinite(norm)
    return Decision(norm, (divisor * clipped).float(), 1.0 - updated.float())


def not_finite_in_a_row(before: int, loss: float, norm: float, config: OptimizerConfig, name: str) -> int:
    """Return how many updates in a row were skipped, `before` this one and with it. Raises `TrainingError`
    when they are `max_skipped_in_a_row`; `name` is that of the optimizer's section."""
    now = 0 if math.isfinite(loss) and math.isfinite(norm) else before + 1
    if now >= config.max_skipped_in_a_row:
        raise TrainingError(
            f"{now} updates in a row were skipped: their loss or gradient was not "
            f"finite (the last: loss {loss}, gradient norm {norm}). Go on from an older checkpoint with "
            f"{name}.lr below {config.lr}, or raise {name}.max_skipped_in_a_row"
        )
    return now
