from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3", "low_var_kl"]
LARGEST = 10.0
"""What `low_var_kl` is cut off at, nats."""


def kl_estimates(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    estimator: Estimator,
    importance_ratio: Tensor | None = None,
) -> Tensor:
    """KL(current || reference) as each token tells it (joschu.net/blog/kl-approx.html), [T] nats.

    With r = log(current / reference) of a token that the current policy sampled, k1 = r, k2 = r^2 / 2 and
    k3 = exp(-r) - 1 + r; low_var_kl is k3 cut off at 10 nats.

    Args:
        logprobs: [T] nats, current policy.
        reference_logprobs: [T] nats.
        loss_mask: [T] bool, True on sampled tokens; elsewhere inputs may be anything and the estimate is 0.
        estimator: which.
        importance_ratio: [T], current / sampling policy, which makes gradient and estimate unbiased where
            another policy sampled the tokens (as in DeepSeek-V3.2); `None` is 1.
    """
    log_ratio = torch.where(loss_mask, logprobs - reference_logprobs, 0.0)
    if estimator == "k1":
        estimates = log_ratio
    elif estimator == "k2":
        estimates = log_ratio.square() / 2
    else:
        estimates = torch.expm1(-log_ratio) + log_ratio
    if importance_ratio is not None:
        estimates = estimates * torch.where(loss_mask, importance_ratio, 0.0)
    return estimates.clamp(-LARGEST, LARGEST) if estimator == "low_var_kl" else estimates
