from torch import Tensor

from learner.algorithms.tokens import LossTokens


def regression_loss(tokens: LossTokens, *, kl_weight: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Squared distance of the sequence's log ratio from its advantage (Kimi k1.5, arXiv:2501.12599, 2.3.2).

    With r the sum of a sequence's log ratios to the behaviour policy, its loss is (A - t r)^2 / (2 t) without
    the constant A^2 / (2 t): -A r + t r^2 / 2. On-policy, where r is 0, its gradient is that of REINFORCE.
    There is no importance weight. Each token has the share of its own log ratio in the first r of r^2, so
    that the tokens of a sequence add up to its loss. It is not separable over tokens.

    Args:
        tokens: N trained tokens of whole sequences.
        kl_weight: t, in units of the advantage per nat.

    Returns the loss of each token, [N], and no sums.
    """
    log_ratio = tokens.bounded_log_ratio_to("behaviour_logprobs")
    of_sequence = tokens.sequence_sum(log_ratio)[tokens.sequence]
    return (kl_weight / 2 * of_sequence - tokens.streams["advantages"]) * log_ratio, {}
