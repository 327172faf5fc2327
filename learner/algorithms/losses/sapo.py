import torch
from torch import Tensor

from learner.algorithms.tokens import LossTokens


def sapo_loss(
    tokens: LossTokens, *, temperature: float, temperature_negative: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient with a soft gate in place of a clip (SAPO, arXiv:2511.20347).

    The gate is 4 / t * sigmoid(t * (r - 1)) of the ratio r to the behaviour policy: its slope is 1 where r is
    1, and falls off on both sides.

    Args:
        tokens: N trained tokens.
        temperature: t of tokens whose advantage is positive.
        temperature_negative: t of the others; a larger one falls off faster.

    Returns the loss of each token, [N], and no sums.
    """
    ratio, advantages = tokens.ratio_to("behaviour_logprobs"), tokens.streams["advantages"]
    t = torch.where(advantages > 0, temperature, temperature_negative)
    return -4 / t * torch.sigmoid(t * (ratio - 1)) * advantages, {}
