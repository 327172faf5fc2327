import torch
from torch import Tensor

from learner.algorithms.tokens import LARGEST_LOG_RATIO


def token_tis(
    log_ratio: Tensor, sequence: Tensor, *, truncation_cap: float
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Truncated importance weight of each token (IMPALA's rho, arXiv:1802.01561).

    Args:
        log_ratio: [N] nats, the policy that the loss takes its tokens to come from over the one that sampled.
        sequence: int64 [N], which sequence a token belongs to; this correction does not ask.
        truncation_cap: upper bound on the weight; `inf` is plain importance sampling.

    Returns weights [N], which tokens are kept [N] (all), and the number of truncated tokens.
    """
    ratio = log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()
    kept = torch.ones_like(sequence, dtype=torch.bool)
    return ratio.clamp(max=truncation_cap), kept, {"truncated_tokens": (ratio > truncation_cap).sum()}
