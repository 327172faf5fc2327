import torch
from torch import Tensor

from learner.algorithms.tokens import LARGEST_LOG_RATIO, LossTokens

LARGEST_LOG_WEIGHT = 13.0
"""Without a decay nothing else bounds weights. This one, times the lowest log-prob that is accepted (-1e30)
and an advantage of hundreds, is still a number of float32."""


def vespo_loss(
    tokens: LossTokens, *, power: float, decay: float, power_negative: float, decay_negative: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient weighed by a smooth function of the sequence's ratio (VESPO, arXiv:2602.10693).

    With W the product of a sequence's ratios to the behaviour policy, the weight is W^k exp(d (1 - W)). It is
    1 where W is 1, largest where W is k / d, and falls to 0 on both sides.

    Args:
        tokens: N trained tokens of whole sequences.
        power: k of tokens whose advantage is not negative.
        decay: d of these tokens.
        power_negative: k of the others.
        decay_negative: d of the others.

    Returns the loss of each token, [N], and no sums.
    """
    advantages = tokens.streams["advantages"]
    log_ratio = tokens.sequence_sum(tokens.logprobs.detach() - tokens.streams["behaviour_logprobs"])
    log_ratio = log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)[tokens.sequence]
    negative = advantages < 0
    k, d = torch.where(negative, power_negative, power), torch.where(negative, decay_negative, decay)
    log_weight = k * log_ratio - d * log_ratio.expm1()  # expm1 is W - 1
    return -log_weight.clamp(max=LARGEST_LOG_WEIGHT).exp() * advantages * tokens.logprobs, {}
