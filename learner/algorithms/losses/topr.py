import torch
from torch import Tensor

from learner.algorithms.tokens import LossTokens


def topr_loss(tokens: LossTokens) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient that weighs only what is to become less likely (TOPR, arXiv:2503.14286, eq. 8).

    Tokens of positive advantage have weight 1. The others have the sequence's ratio to the behaviour policy,
    at most 1: what the policy would hardly say any more is not pushed down further.

    Returns the loss of each token, [N], and which tokens had their ratio cut off at 1, [N].
    """
    advantages = tokens.streams["advantages"]
    log_ratio = tokens.sequence_sum(tokens.logprobs.detach() - tokens.streams["behaviour_logprobs"])
    log_ratio = log_ratio[tokens.sequence]
    weight = torch.where(advantages > 0, 1.0, log_ratio.clamp(max=0).exp())
    clipped = (advantages <= 0) & (log_ratio > 0)
    return -weight * advantages * tokens.logprobs, {"clipped_tokens": clipped}
