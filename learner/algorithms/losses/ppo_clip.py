import torch
from torch import Tensor


def ppo_clip_loss(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_eps: float,
    clip_eps_high: float,
    truncation_cap: float | None = None,
    proximal_logprobs: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate (arXiv:1707.06347), optionally decoupled (arXiv:2505.24298).

    Args:
        logprobs: [T] nats, current policy; the only input that carries gradient.
        behaviour_logprobs: [T] nats, recorded by the engine when it sampled.
        advantages: [T], already spread from trajectories to tokens.
        loss_mask: [T] bool, True on sampled tokens; elsewhere inputs may be anything, NaN included.
        clip_eps: how far below 1 the ratio may fall.
        clip_eps_high: how far above 1 it may rise.
        truncation_cap: upper bound on the weight proximal / behaviour; `None` leaves the weight out.
        proximal_logprobs: [T] nats, the centre of the clip; `None` is the behaviour policy.

    Returns the loss summed over the mask (callers divide by the global token count) and detached sums.
    """
    proximal = behaviour_logprobs if proximal_logprobs is None else proximal_logprobs
    advantages = torch.where(loss_mask, advantages, 0.0)
    ratio = torch.where(loss_mask, logprobs - proximal, 0.0).exp()
    clipped = ratio.clamp(1 - clip_eps, 1 + clip_eps_high)
    token_loss = -torch.minimum(ratio * advantages, clipped * advantages)
    if truncation_cap is not None:
        log_weight = torch.where(loss_mask, proximal - behaviour_logprobs, 0.0)
        token_loss = token_loss * log_weight.exp().clamp(max=truncation_cap)
    return token_loss.sum(), {"clipped_tokens": (clipped * advantages < ratio * advantages).sum()}
