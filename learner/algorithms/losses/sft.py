import torch
from torch import Tensor


def sft_loss(logprobs: Tensor, loss_mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the tokens under the mask.

    Args:
        logprobs: [T] nats, current policy; carries gradient.
        loss_mask: [T] bool, True on the tokens to imitate.

    Returns the loss summed over the mask (callers divide by the global token count) and detached sums.
    """
    return torch.where(loss_mask, -logprobs, 0.0).sum(), {}
