"""Losses that stop the gradient of a token, or of a sequence, whose ratio has moved far enough."""

import torch
from torch import Tensor

from learner.algorithms.tokens import LARGEST_LOG_RATIO, LossTokens


def ppo_clip_loss(
    tokens: LossTokens, *, centre: str, clip_eps: float, clip_eps_high: float | None, dual_clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy gradient (arXiv:1707.06347, eq. 7) with an upper bound of its own (arXiv:2503.14476).

    Returns the loss of each token, [N], and which tokens are clipped, [N]."""
    advantages, ratio = tokens.streams["advantages"], tokens.ratio_to(f"{centre}_logprobs")
    high = clip_eps if clip_eps_high is None else clip_eps_high
    free, clipped = ratio * advantages, ratio.clamp(1 - clip_eps, 1 + high) * advantages
    objective, without_gradient = torch.minimum(free, clipped), clipped < free
    if dual_clip is not None:
        bounded = (advantages < 0) & (ratio > dual_clip)
        objective = torch.where(bounded, dual_clip * advantages, objective)
        without_gradient |= bounded
    return -objective, {"clipped_tokens": without_gradient}


def gspo_loss(
    tokens: LossTokens, *, sequence_clip_eps: float, sequence_clip_eps_high: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy gradient by sequence (arXiv:2507.18071, eq. 5 to 7).

    The ratio of a sequence is the exponential of its mean log ratio to the behaviour policy. It is not
    separable over tokens: each token's gradient depends on the whole sequence.

    Returns the loss of each token, [N], which is that of its sequence, and which tokens are clipped, [N]."""
    log_ratio = tokens.sequence_mean(tokens.logprobs - tokens.streams["behaviour_logprobs"])
    ratio = log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()[tokens.sequence]
    advantages = tokens.streams["advantages"]
    low, high = sequence_clip_eps, sequence_clip_eps_high
    high = low if high is None else high
    free, clipped = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    return -torch.minimum(free, clipped), {"clipped_tokens": clipped < free}


def gmpo_loss(
    tokens: LossTokens, *, log_clip: float, log_clip_high: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient of the geometric mean of clipped ratios (GMPO, arXiv:2507.20673).

    Each token's log ratio to the behaviour policy is cut off on the side to which its advantage pushes; the
    ratio of a sequence is the exponential of their mean. It is not separable over tokens: each token's
    gradient depends on the whole sequence.

    Returns the loss of each token, [N], which is that of its sequence, and which tokens were cut off, [N]."""
    advantages, high = tokens.streams["advantages"], log_clip if log_clip_high is None else log_clip_high
    free = tokens.logprobs - tokens.streams["behaviour_logprobs"]
    cut = free.clamp(-log_clip, high)
    bounded = torch.where(advantages > 0, torch.minimum(free, cut), torch.maximum(free, cut))
    ratio = tokens.sequence_mean(bounded).clamp(max=LARGEST_LOG_RATIO).exp()[tokens.sequence]
    return -ratio * advantages, {"clipped_tokens": bounded.detach() != free.detach()}


def clip_cov_loss(
    tokens: LossTokens, *, clip_eps: float, clip_eps_high: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped policy gradient without the picked tokens (Clip-Cov, arXiv:2505.22617).

    Args:
        tokens: N trained tokens, with the stream `picked_by_covariance`.
        clip_eps: how far below 1 the ratio may fall.
        clip_eps_high: how far above 1 it may rise; `None` means `clip_eps`.

    Returns the loss of each token, [N], and which tokens have no gradient, [N]."""
    losses, found = ppo_clip_loss(
        tokens, centre="behaviour", clip_eps=clip_eps, clip_eps_high=clip_eps_high, dual_clip=None
    )
    picked = tokens.streams["picked_by_covariance"] > 0
    return torch.where(picked, 0.0, losses), {"clipped_tokens": found["clipped_tokens"] | picked}


def kl_cov_loss(tokens: LossTokens, *, picked_kl_coef: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Unclipped policy gradient that keeps the picked tokens near the behaviour policy (KL-Cov,
    arXiv:2505.22617).

    The penalty of a picked token is |log ratio|, as in the authors' code.

    Args:
        tokens: N trained tokens, with the stream `picked_by_covariance`.
        picked_kl_coef: weight of the penalty, per nat.

    Returns the loss of each token, [N], and no sums."""
    ratio = tokens.ratio_to("behaviour_logprobs")
    distance = tokens.bounded_log_ratio_to("behaviour_logprobs").abs()
    picked = tokens.streams["picked_by_covariance"]
    return picked_kl_coef * picked * distance - ratio * tokens.streams["advantages"], {}


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
    `clipped`, bool [N]."""
    values, old_values, targets = values.double(), old_values.double(), targets.double()
    held = old_values + (values - old_values).clamp(-value_clip, value_clip)
    error, held_error = (values - targets).square(), (held - targets).square()
    return 0.5 * torch.maximum(error, held_error), {"clipped": (held_error > error).detach()}
