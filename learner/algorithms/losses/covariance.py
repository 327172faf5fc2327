"""Losses that treat a few tokens apart: those whose advantage and log-prob grow together, which takes away
entropy (arXiv:2505.22617). Which they are is decided over the whole update (learner/algorithms/selection.py).
"""

import torch
from torch import Tensor

from learner.algorithms.losses.ppo_clip import ppo_clip_loss
from learner.algorithms.tokens import LossTokens


def clip_cov_loss(
    tokens: LossTokens, *, clip_eps: float, clip_eps_high: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped policy gradient without the picked tokens (Clip-Cov, arXiv:2505.22617).

    Args:
        tokens: N trained tokens, with the stream `picked_by_covariance`.
        clip_eps: how far below 1 the ratio may fall.
        clip_eps_high: how far above 1 it may rise; `None` means `clip_eps`.

    Returns the loss of each token, [N], and which tokens have no gradient, [N].
    """
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

    Returns the loss of each token, [N], and no sums.
    """
    ratio = tokens.ratio_to("behaviour_logprobs")
    distance = tokens.bounded_log_ratio_to("behaviour_logprobs").abs()
    picked = tokens.streams["picked_by_covariance"]
    return picked_kl_coef * picked * distance - ratio * tokens.streams["advantages"], {}
