import torch
from torch import Tensor


def tis_loss(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    truncation_cap: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Token-level REINFORCE under a truncated importance ratio (IMPALA's rho, arXiv:1802.01561).

    Args:
        logprobs: [T] nats, current policy; the only input that carries gradient.
        behaviour_logprobs: [T] nats, recorded by the engine when it sampled.
        advantages: [T], already spread from trajectories to tokens.
        loss_mask: [T] bool, True on sampled tokens; elsewhere inputs may be anything, NaN included.
        truncation_cap: upper bound on the ratio; `inf` is plain importance sampling.

    Returns the loss summed over the mask (callers divide by the global token count) and detached sums.
    """
    ratio = torch.where(loss_mask, logprobs.detach() - behaviour_logprobs, 0.0).exp()
    weight = ratio.clamp(max=truncation_cap) * torch.where(loss_mask, advantages, 0.0)
    token_loss = -weight * torch.where(loss_mask, logprobs, 0.0)
    return token_loss.sum(), {"clipped_tokens": ((ratio > truncation_cap) & loss_mask).sum()}
