"""Lets a correction or rejection see whole sequences whose tokens are divided over ranks."""

from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from learner.algorithms.tokens import LossTokens

OfTokens = Callable[..., tuple[Tensor, Tensor, dict[str, Tensor]]]
"""Takes values of tokens, [N] each, and last the sequence of each token [N]; returns weights [N], which
tokens are kept [N], and sums to log."""


def by_sequence(values: Tensor, sequence: Tensor, over: Literal["product", "mean"]) -> Tensor:
    """Add up log values [N] over each token's sequence (the log of their product), or take the mean; [N]."""
    _, number = torch.unique(sequence, return_inverse=True)
    sums = torch.zeros_like(values).index_add(0, number, values)
    if over == "mean":
        sums = sums / torch.zeros_like(values).index_add(0, number, torch.ones_like(values)).clamp(min=1)
    return sums[number]


def over_whole_sequences(
    function: OfTokens, tokens: LossTokens, *values: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Call `function` with the tokens of all ranks that share these sequences, in the order of the text.

    Args:
        function: is called once, with the same arguments on every rank.
        tokens: this rank's tokens. Ranks may have different numbers of them.
        values: [N] each, of this rank's tokens; they carry no gradient.

    Returns what `function` said of this rank's tokens, and this rank's part of its sums.
    """
    group = tokens.context_group
    if group is None or group.size() == 1:
        return function(*values, tokens.sequence)
    own = torch.stack([tokens.sequence.double(), tokens.positions.double(), *(v.double() for v in values)])
    parts = _gathered(own, group)
    sequence, positions, *gathered = torch.cat(parts, dim=1)
    by_position = torch.argsort(positions, stable=True)
    in_text = by_position[torch.argsort(sequence[by_position], stable=True)]
    arguments = [found[in_text].to(value.dtype) for found, value in zip(gathered, values, strict=True)]
    weights, kept, sums = function(*arguments, sequence[in_text].long())
    begin = sum(part.shape[1] for part in parts[: group.rank()])
    mine = torch.argsort(in_text)[begin : begin + own.shape[1]]
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
