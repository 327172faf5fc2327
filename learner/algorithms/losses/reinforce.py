from torch import Tensor

from learner.algorithms.tokens import LossTokens


def reinforce_loss(tokens: LossTokens) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient (Williams 1992): minus advantage times log-probability.

    It takes its tokens to come from the current policy; a correction weighs those that did not.

    Returns the loss of each token, [N], and no sums.
    """
    return -tokens.streams["advantages"] * tokens.logprobs, {}
