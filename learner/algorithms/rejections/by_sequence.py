"""Rejections that look at whole sequences. Their arguments are those of by_token.py, with all tokens of each
sequence."""

from typing import Literal

import torch
from torch import Tensor

from learner.algorithms.tokens import LARGEST_LOG_RATIO
from learner.algorithms.whole_sequences import by_sequence


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
