"""KL divergence from a teacher over its likeliest tokens, with all other tokens as one."""

from typing import Final, Literal

import torch
from torch import Tensor

Direction = Literal["reverse", "forward"]
DIRECTIONS: Final[tuple[Direction, ...]] = ("reverse", "forward")


def top_k_kl(logprobs: Tensor, teacher_logprobs: Tensor, *, direction: Direction) -> Tensor:
    """Return the divergence of two distributions over K tokens and the rest of the vocabulary, [N] nats.

    With p of the policy and q of the teacher, `reverse` is KL(policy || teacher) = sum p log(p / q), and
    `forward` is KL(teacher || policy) = sum q log(q / p). All other tokens count as one, so both are lower
    bounds of the divergences over the whole vocabulary, and equal to them where the others have no mass.

    Args:
        logprobs: [N, K + 1] nats, current policy, of the teacher's tokens and of all others together; finite.
        teacher_logprobs: [N, K + 1] nats; -inf for entries that are none, which do not count.
        direction: which of the two.
    """
    counts = teacher_logprobs != -torch.inf  # NaN counts: a step with it must not train
    policy, teacher = (torch.where(counts, each, 0.0) for each in (logprobs, teacher_logprobs))
    ratio = policy - teacher
    terms = policy.exp() * ratio if direction == "reverse" else -teacher.exp() * ratio
    return torch.where(counts, terms, 0.0).sum(-1)
