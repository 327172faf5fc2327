from torch import Tensor

from learner.algorithms.tokens import LossTokens


def sft_loss(tokens: LossTokens) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the negative log-likelihood of each token, [N], and no sums."""
    return -tokens.logprobs, {}
