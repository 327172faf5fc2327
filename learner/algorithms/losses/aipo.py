from torch import Tensor

from learner.algorithms.losses.cispo import cispo_loss
from learner.algorithms.tokens import LossTokens


def aipo_loss(tokens: LossTokens, *, ratio_cap: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient weighed by the ratio to the behaviour policy, cut off from above (AIPO of LlamaRL,
    arXiv:2505.24034).

    It is CISPO without a lower bound, and has the gradient of REINFORCE with token TIS.

    Returns the loss of each token, [N], and which tokens were cut off, [N].
    """
    return cispo_loss(tokens, lowest_weight=0.0, highest_weight=ratio_cap)
