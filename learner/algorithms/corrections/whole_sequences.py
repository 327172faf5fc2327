"""Lets a correction see whole sequences whose tokens are divided over ranks."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from learner.algorithms.tokens import LossTokens

Correction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]
"""A correction takes log ratios [N] and the sequence of each token [N]; it returns weights [N], which tokens
are kept [N], and sums to log."""


def over_whole_sequences(
    correction: Correction, log_ratio: Tensor, tokens: LossTokens
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Call `correction` with the tokens of all ranks that share these sequences, in the order of the text.

    Args:
        correction: is called once, with the same arguments on every rank.
        log_ratio: [N] nats, of this rank's tokens; carries no gradient.
        tokens: this rank's tokens. Ranks may have different numbers of them.

    Returns what `correction` said of this rank's tokens, and this rank's part of its sums.
    """
    group = tokens.context_group
    if group is None or group.size() == 1:
        return correction(log_ratio, tokens.sequence)
    own = torch.stack((log_ratio.double(), tokens.sequence.double(), tokens.positions.double()))
    parts = _gathered(own, group)
    ratios, sequence, positions = torch.cat(parts, dim=1)
    by_sequence = torch.argsort(positions, stable=True)
    in_text = by_sequence[torch.argsort(sequence[by_sequence], stable=True)]
    weights, kept, sums = correction(ratios[in_text].to(log_ratio.dtype), sequence[in_text].long())
    begin = sum(part.shape[1] for part in parts[: group.rank()])
    mine = torch.argsort(in_text)[begin : begin + len(log_ratio)]
    return weights[mine], kept[mine], {name: value / group.size() for name, value in sums.items()}


def _gathered(own: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the columns of every rank of `group`, of which each has its own number."""
    columns = torch.tensor([own.shape[1]], device=own.device)
    counts = [torch.empty_like(columns) for _ in range(group.size())]
    dist.all_gather(counts, columns, group=group)
    most = max(int(count) for count in counts)
    padded = torch.nn.functional.pad(own, (0, most - own.shape[1]))
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    return [part[:, : int(count)] for part, count in zip(parts, counts, strict=True)]
