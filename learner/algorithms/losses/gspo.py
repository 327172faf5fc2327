import torch
from torch import Tensor

from learner.algorithms.tokens import LARGEST_LOG_RATIO, LossTokens


def gspo_loss(
    tokens: LossTokens, *, sequence_clip_eps: float, sequence_clip_eps_high: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy gradient by sequence (arXiv:2507.18071, eq. 5 to 7).

    The ratio of a sequence is the exponential of its mean log ratio to the behaviour policy. It is not
    separable over tokens: each token's gradient depends on the whole sequence.

    Returns the loss of each token, [N], which is that of its sequence, and which tokens are clipped, [N].
    """
    log_ratio = tokens.sequence_mean(tokens.logprobs - tokens.streams["behaviour_logprobs"])
    ratio = log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()[tokens.sequence]
    advantages = tokens.streams["advantages"]
    low, high = sequence_clip_eps, sequence_clip_eps_high
    high = low if high is None else high
    free, clipped = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    return -torch.minimum(free, clipped), {"clipped_tokens": clipped < free}
