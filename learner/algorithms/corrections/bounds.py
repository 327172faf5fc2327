"""Tells what becomes of importance weights out of bounds."""

from typing import Literal

import torch
from torch import Tensor

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
        floor: lower bound with "clip" and "mask"; `None` is 1 / cap.
    """
    kept = torch.ones_like(ratio, dtype=torch.bool)
    if bound == "truncate":
        return ratio.clamp(max=cap), kept, {"truncated_tokens": ratio > cap}
    lowest = 1 / cap if floor is None else floor
    outside = (ratio > cap) | (ratio < lowest)
    if bound == "mask":
        kept = ~outside
    return ratio.clamp(lowest, cap), kept, {"truncated_tokens": outside}
