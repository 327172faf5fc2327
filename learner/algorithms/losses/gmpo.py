import torch
from torch import Tensor

from learner.algorithms.tokens import LARGEST_LOG_RATIO, LossTokens


def gmpo_loss(
    tokens: LossTokens, *, log_clip: float, log_clip_high: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient of the geometric mean of clipped ratios (GMPO, arXiv:2507.20673).

    Each token's log ratio to the behaviour policy is cut off on the side to which its advantage pushes; the
    ratio of a sequence is the exponential of their mean. It is not separable over tokens: each token's
    gradient depends on the whole sequence.

    Returns the loss of each token, [N], which is that of its sequence, and which tokens were cut off, [N].
    """
    advantages, high = tokens.streams["advantages"], log_clip if log_clip_high is None else log_clip_high
    free = tokens.logprobs - tokens.streams["behaviour_logprobs"]
    cut = free.clamp(-log_clip, high)
    bounded = torch.where(advantages > 0, torch.minimum(free, cut), torch.maximum(free, cut))
    ratio = tokens.sequence_mean(bounded).clamp(max=LARGEST_LOG_RATIO).exp()[tokens.sequence]
    return -ratio * advantages, {"clipped_tokens": bounded.detach() != free.detach()}
