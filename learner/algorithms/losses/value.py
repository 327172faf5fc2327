"""The loss of a critic."""

import torch
from torch import Tensor


def value_loss(
    values: Tensor, old_values: Tensor, targets: Tensor, *, value_clip: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return half the squared error of each value, not less than where it stays near the old one (PPO2).

    So a value that has moved by more than `value_clip` towards its target gains nothing, as a clipped ratio
    of the policy does (arXiv:1707.06347); one that has moved away is drawn back.

    Args:
        values: [N], which carry gradient.
        old_values: [N], before the step.
        targets: [N], what the values should be.
        value_clip: distance from the old value.

    Returns the losses, [N] in float64, whose squares of any finite float32 are finite, and which values are
    `clipped`, bool [N].
    """
    values, old_values, targets = values.double(), old_values.double(), targets.double()
    held = old_values + (values - old_values).clamp(-value_clip, value_clip)
    error, held_error = (values - targets).square(), (held - targets).square()
    return 0.5 * torch.maximum(error, held_error), {"clipped": (held_error > error).detach()}
