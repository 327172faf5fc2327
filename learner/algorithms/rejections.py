"""Which tokens are too far from the policy to be trained on.

All are called with log ratios [N] (the policy that the loss takes its tokens to come from over the one that
sampled, nats), the former's log-probs [N], advantages [N] and the sequence of each token [N]. They return
which tokens are kept, bool [N]. Those that look at whole sequences get all tokens of each sequence."""

from typing import Literal

import torch
from torch import Tensor

from learner.algorithms.tokens import LARGEST_LOG_RATIO, by_sequence

CERTAIN = 1e-6
"""Probabilities are kept this far from 0 and 1 in a logarithm: float32 takes likely tokens for certain."""


def token_range(
    log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, sequence: Tensor, *,
    lowest: float, highest: float,
) -> Tensor:  # fmt: skip
    """Keep tokens whose importance ratio lies from `lowest` to `highest` (IcePop, arXiv:2510.18855)."""
    ratio = log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()
    return (ratio >= lowest) & (ratio <= highest)


def binary_tv(
    log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, sequence: Tensor, *, largest_change: float
) -> Tensor:
    """Reject tokens whose probability moved more than `largest_change` in the direction of their advantage.

    That is the total variation between the two policies as to whether the token is taken (DPPO-TV,
    arXiv:2602.04879)."""
    moved = logprobs.exp() - (logprobs - log_ratio).exp()
    return ~((moved.abs() > largest_change) & (moved * advantages > 0))


def binary_kl(
    log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, sequence: Tensor, *, largest_kl: float
) -> Tensor:
    """Reject tokens that have moved by more than `largest_kl` nats in the direction of their advantage.

    That is KL(mu || pi) as to whether the token is taken, mu having sampled it (DPPO-KL,
    arXiv:2602.04879)."""
    kl = _binary_kl(logprobs - log_ratio, logprobs)
    return ~((kl > largest_kl) & (log_ratio * advantages > 0))


def binary_kl_two_way(
    log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, sequence: Tensor, *, largest_kl_either_way: float
) -> Tensor:
    """Reject tokens that differ by more than `largest_kl_either_way` nats.

    That is the larger of KL(mu || pi) and KL(pi || mu) as to whether the token is taken (KPop,
    ringtech.notion.site/kpop)."""
    then = logprobs - log_ratio
    return torch.maximum(_binary_kl(then, logprobs), _binary_kl(logprobs, then)) <= largest_kl_either_way


def _binary_kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p || q) of tokens taken with these log-probs or not, [N] nats."""
    p, q = (each.exp().clamp(CERTAIN, 1 - CERTAIN) for each in (p, q))
    return p * (p.log() - q.log()) + (1 - p) * ((-p).log1p() - (-q).log1p())


def sequence_range(
    log_ratio: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    *,
    lowest_of_sequence: float,
    highest_of_sequence: float,
    over: Literal["product", "mean"],
) -> Tensor:
    """Keep sequences whose ratio lies in the range: the product of the tokens' ratios (masked importance
    sampling, with `sequence_tis`), or their geometric mean (geometric rejection)."""
    ratio = by_sequence(log_ratio, sequence, over).clamp(max=LARGEST_LOG_RATIO).exp()
    return (ratio >= lowest_of_sequence) & (ratio <= highest_of_sequence)


def veto(
    log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, sequence: Tensor, *, smallest: float
) -> Tensor:
    """Reject sequences with a token whose ratio is below `smallest`: the policy would hardly have sampled
    it."""
    impossible = (log_ratio.exp() < smallest).to(log_ratio.dtype)
    return by_sequence(impossible, sequence, "product") == 0


def negative_divergence(
    log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, sequence: Tensor, *, largest_drop: float
) -> Tensor:
    """Reject tokens of negative advantage in sequences that have become less likely by more than
    `largest_drop` nats a token (off-policy sequence masking of DeepSeek-V3.2, arXiv:2512.02556)."""
    return torch.logical_not((advantages < 0) & (-by_sequence(log_ratio, sequence, "mean") > largest_drop))
