"""Importance weights of tokens that another policy sampled, and what becomes of weights out of bounds."""

from typing import Literal

import torch
from torch import Tensor

from learner.algorithms.tokens import LARGEST_LOG_RATIO, by_sequence

Bound = Literal["truncate", "clip", "mask"]


def uncorrected(log_ratio: Tensor, sequence: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return weights of 1 [N], which keep every token [N], and no sums."""
    return torch.ones_like(log_ratio), torch.ones_like(sequence, dtype=torch.bool), {}


def bounded(
    ratio: Tensor, *, cap: float, bound: Bound, floor: float | None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return weights [N], which tokens are kept [N], and which had a ratio out of bounds [N].

    Args:
        ratio: [N], importance ratios.
        cap: upper bound.
        bound: "truncate" cuts off at the cap (TIS, arXiv:1802.01561), "clip" also at the floor (CIS), "mask"
            leaves out tokens beyond either (MIS).
        floor: lower bound with "clip" and "mask"; `None` is 1 / cap."""
    kept = torch.ones_like(ratio, dtype=torch.bool)
    if bound == "truncate":
        return ratio.clamp(max=cap), kept, {"truncated_tokens": ratio > cap}
    lowest = 1 / cap if floor is None else floor
    outside = (ratio > cap) | (ratio < lowest)
    if bound == "mask":
        kept = ~outside
    return ratio.clamp(lowest, cap), kept, {"truncated_tokens": outside}


def token_tis(
    log_ratio: Tensor,
    sequence: Tensor,
    *,
    truncation_cap: float,
    bound: Bound = "truncate",
    floor: float | None = None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Bounded importance weight of each token (IMPALA's rho, arXiv:1802.01561).

    Args:
        log_ratio: [N] nats, the policy that the loss takes its tokens to come from over the one that sampled.
        sequence: int64 [N], which sequence a token belongs to; this correction does not ask.

    Returns weights [N], which tokens are kept [N], and which had a ratio out of bounds [N]."""
    ratio = log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()
    return bounded(ratio, cap=truncation_cap, bound=bound, floor=floor)


def sequence_tis(
    log_ratio: Tensor,
    sequence: Tensor,
    *,
    sequence_cap: float,
    over: Literal["product", "mean"],
    bound: Bound = "truncate",
    floor: float | None = None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Bounded importance weight of each sequence, which all its tokens share.

    The product of the tokens' ratios is the sequence's exact ratio; their geometric mean varies less and is
    biased (arXiv:2507.18071, eq. 7).

    Args:
        log_ratio: [N] nats, the policy that the loss takes its tokens to come from over the one that sampled.
        sequence: int64 [N], which sequence a token belongs to; all tokens of a sequence are here.

    Returns weights [N], which tokens are kept [N], and which had a ratio out of bounds [N]."""
    ratio = by_sequence(log_ratio, sequence, over).clamp(max=LARGEST_LOG_RATIO).exp()
    return bounded(ratio, cap=sequence_cap, bound=bound, floor=floor)
