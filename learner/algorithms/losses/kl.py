from typing import Final, Literal

import torch
from torch import Tensor

from learner.algorithms.tokens import LARGEST_DISTANCE, LARGEST_LOG_RATIO

KlEstimator = Literal["k1", "k2", "k3", "low_var_kl"]
LARGEST = 10.0
"""Bound in nats on `low_var_kl`."""


def kl_estimates(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    *,
    estimator: KlEstimator,
    importance_ratio: Tensor | None = None,
) -> Tensor:
    """Estimate KL(current || reference) at each token (joschu.net/blog/kl-approx.html), [N] nats.

    With r = log(current / reference) of a token that the current policy sampled, k1 = r, k2 = r^2 / 2 and
    k3 = exp(-r) - 1 + r; low_var_kl is k3 cut off at 10 nats. In the exponential, r is at least -20.

    Args:
        logprobs: [N] nats, current policy.
        reference_logprobs: [N] nats.
        estimator: which of them.
        importance_ratio: [N], current / sampling policy, which makes gradient and estimate unbiased where
            another policy sampled the tokens (as in DeepSeek-V3.2); `None` is 1."""
    # even of a distance that cannot be, the square and the product with the ratio must be finite
    log_ratio = (logprobs - reference_logprobs).clamp(-LARGEST_DISTANCE, LARGEST_DISTANCE)
    if estimator == "k1":
        estimates = log_ratio
    elif estimator == "k2":
        estimates = log_ratio.square() / 2
    else:
        bounded = log_ratio.clamp(
            min=-LARGEST_LOG_RATIO
        )  # in both terms: one alone would turn the gradient around
        estimates = torch.expm1(-bounded) + bounded
    if importance_ratio is not None:
        estimates = estimates * importance_ratio
    return estimates.clamp(-LARGEST, LARGEST) if estimator == "low_var_kl" else estimates


Direction = Literal["reverse", "forward"]
DIRECTIONS: Final[tuple[Direction, ...]] = ("reverse", "forward")


def top_k_kl(logprobs: Tensor, teacher_logprobs: Tensor, *, direction: Direction) -> Tensor:
    """Return the divergence of two distributions over K tokens and the rest of the vocabulary, [N] nats.

    With p of the policy and q of the teacher, `reverse` is KL(policy || teacher) = sum p log(p / q), and
    `forward` is KL(teacher || policy) = sum q log(q / p). All other tokens count as one, so both are lower
    bounds of the divergences over the whole vocabulary, and equal to them where the others have no mass.

    Args:
        logprobs: [N, K + 1] nats, current policy, of the teacher's tokens and of all others together; finite.
        teacher_logprobs: [N, K + 1] nats; -inf for entries that are none, which do not count.
        direction: which of the two."""
    counts = teacher_logprobs != -torch.inf  # NaN counts: a step with it must not train
    policy, teacher = (torch.where(counts, each, 0.0) for each in (logprobs, teacher_logprobs))
    ratio = policy - teacher
    terms = policy.exp() * ratio if direction == "reverse" else -teacher.exp() * ratio
    return torch.where(counts, terms, 0.0).sum(-1)
