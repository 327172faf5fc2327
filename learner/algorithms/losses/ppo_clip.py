import torch
from torch import Tensor

from learner.algorithms.tokens import LossTokens


def ppo_clip_loss(
    tokens: LossTokens,
    *,
    centre: str,
    clip_eps: float,
    clip_eps_high: float | None,
    dual_clip: float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy gradient (arXiv:1707.06347, eq. 7) with an upper bound of its own (arXiv:2503.14476).

    Returns the loss of each token, [N], and which tokens are clipped, [N].
    """
    advantages, ratio = tokens.streams["advantages"], tokens.ratio_to(f"{centre}_logprobs")
    high = clip_eps if clip_eps_high is None else clip_eps_high
    free, clipped = ratio * advantages, ratio.clamp(1 - clip_eps, 1 + high) * advantages
    objective, without_gradient = torch.minimum(free, clipped), clipped < free
    if dual_clip is not None:
        bounded = (advantages < 0) & (ratio > dual_clip)
        objective = torch.where(bounded, dual_clip * advantages, objective)
        without_gradient |= bounded
    return -objective, {"clipped_tokens": without_gradient}
