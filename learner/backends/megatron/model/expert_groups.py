"""Routing that is limited to the best groups of experts, as DeepSeek's is."""

import torch
from torch import Tensor


def of_best_groups(scores: Tensor, groups: int, chosen: int) -> Tensor:
    """Return scores of experts [T, E] with those of all but the `chosen` best groups at minus infinity.

    A group's score is the sum of its two largest (arXiv:2412.19437, section 2.1.2). Megatron-core's own
    groups add up as many as a group gives experts on average, which is another number in some models."""
    if chosen == groups:
        return scores
    grouped = scores.view(len(scores), groups, scores.shape[1] // groups)  # of 0 tokens too
    best = grouped.topk(2, dim=-1).values.sum(-1).topk(chosen, dim=-1).indices
    out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, False)
    return grouped.masked_fill(out[..., None], -torch.inf).flatten(1)
