from torch import Tensor

from learner.algorithms.tokens import LossTokens


def cispo_loss(
    tokens: LossTokens, *, lowest_weight: float, highest_weight: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient weighed by the clipped ratio to the behaviour policy (CISPO, arXiv:2506.13585, eq. 4).

    Unlike PPO's clip it leaves no token without a gradient.

    Returns the loss of each token, [N], and which tokens are clipped, [N].
    """
    ratio = tokens.ratio_to("behaviour_logprobs").detach()
    weight = ratio.clamp(lowest_weight, highest_weight)
    losses = -weight * tokens.streams["advantages"] * tokens.logprobs
    return losses, {"clipped_tokens": weight != ratio}
