"""Losses that weigh the gradient of each token, and have no hard clip of the ratio."""

import torch
from torch import Tensor

from learner.algorithms.tokens import LARGEST_LOG_RATIO, LossTokens


def sft_loss(tokens: LossTokens) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the negative log-likelihood of each token, [N], and no sums."""
    return -tokens.logprobs, {}


def reinforce_loss(tokens: LossTokens) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient (Williams 1992): minus advantage times log-probability.

    It takes its tokens to come from the current policy; a correction weighs those that did not.

    Returns the loss of each token, [N], and no sums."""
    return -tokens.streams["advantages"] * tokens.logprobs, {}


def cispo_loss(
    tokens: LossTokens, *, lowest_weight: float, highest_weight: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient weighed by the clipped ratio to the behaviour policy (CISPO, arXiv:2506.13585, eq. 4).

    Unlike PPO's clip it leaves no token without a gradient.

    Returns the loss of each token, [N], and which tokens are clipped, [N]."""
    ratio = tokens.ratio_to("behaviour_logprobs").detach()
    weight = ratio.clamp(lowest_weight, highest_weight)
    losses = -weight * tokens.streams["advantages"] * tokens.logprobs
    return losses, {"clipped_tokens": weight != ratio}


def aipo_loss(tokens: LossTokens, *, ratio_cap: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient weighed by the ratio to the behaviour policy, cut off from above (AIPO of LlamaRL,
    arXiv:2505.24034).

    It is CISPO without a lower bound, and has the gradient of REINFORCE with token TIS.

    Returns the loss of each token, [N], and which tokens were cut off, [N]."""
    return cispo_loss(tokens, lowest_weight=0.0, highest_weight=ratio_cap)


def topr_loss(tokens: LossTokens) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient that weighs only what is to become less likely (TOPR, arXiv:2503.14286, eq. 8).

    Tokens of positive advantage have weight 1. The others have the sequence's ratio to the behaviour policy,
    at most 1: what the policy would hardly say any more is not pushed down further.

    Returns the loss of each token, [N], and which tokens had their ratio cut off at 1, [N]."""
    advantages = tokens.streams["advantages"]
    log_ratio = tokens.sequence_sum(tokens.logprobs.detach() - tokens.streams["behaviour_logprobs"])
    log_ratio = log_ratio[tokens.sequence]
    weight = torch.where(advantages > 0, 1.0, log_ratio.clamp(max=0).exp())
    clipped = (advantages <= 0) & (log_ratio > 0)
    return -weight * advantages * tokens.logprobs, {"clipped_tokens": clipped}


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

    Returns the loss of each token, [N], and no sums."""
    advantages = tokens.streams["advantages"]
    log_ratio = tokens.sequence_sum(tokens.logprobs.detach() - tokens.streams["behaviour_logprobs"])
    log_ratio = log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)[tokens.sequence]
    negative = advantages < 0
    k, d = torch.where(negative, power_negative, power), torch.where(negative, decay_negative, decay)
    log_weight = k * log_ratio - d * log_ratio.expm1()  # expm1 is W - 1
    return -log_weight.clamp(max=LARGEST_LOG_WEIGHT).exp() * advantages * tokens.logprobs, {}


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

    Returns the loss of each token, [N], and no sums."""
    ratio, advantages = tokens.ratio_to("behaviour_logprobs"), tokens.streams["advantages"]
    t = torch.where(advantages > 0, temperature, temperature_negative)
    return -4 / t * torch.sigmoid(t * (ratio - 1)) * advantages, {}


def regression_loss(tokens: LossTokens, *, kl_weight: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Squared distance of the sequence's log ratio from its advantage (Kimi k1.5, arXiv:2501.12599, 2.3.2).

    With r the sum of a sequence's log ratios to the behaviour policy, its loss is (A - t r)^2 / (2 t) without
    the constant A^2 / (2 t): -A r + t r^2 / 2. On-policy, where r is 0, its gradient is that of REINFORCE.
    There is no importance weight. Each token has the share of its own log ratio in the first r of r^2, so
    that the tokens of a sequence add up to its loss. It is not separable over tokens.

    Args:
        tokens: N trained tokens of whole sequences.
        kl_weight: t, in units of the advantage per nat.

    Returns the loss of each token, [N], and no sums."""
    log_ratio = tokens.bounded_log_ratio_to("behaviour_logprobs")
    of_sequence = tokens.sequence_sum(log_ratio)[tokens.sequence]
    return (kl_weight / 2 * of_sequence - tokens.streams["advantages"]) * log_ratio, {}
