"""Lets a correction or rejection see whole sequences whose tokens are divided over ranks."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from learner.algorithms.tokens import LossTokens
from learner.distributed.process_group import gathered_columns

OfTokens = Callable[..., tuple[Tensor, Tensor, dict[str, Tensor]]]
"""Takes values of tokens, [N] each, and last the sequence of each token [N]; returns weights [N], which
tokens are kept [N], and what to log: sums [], or which tokens are counted [N]."""


def by_sequence(values: Tensor, sequence: Tensor, over: Literal["product", "mean"]) -> Tensor:
    """Add up log values [N] over each token's sequence (the log of their product), or take the mean; float64
    [N]."""
    values = values.double()
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

    Returns what `function` said of this rank's tokens, and this rank's part of its sums and masks.
    """
    group = tokens.context_group
    if group is None or group.size() == 1:
        return function(*values, tokens.sequence)
    own = torch.stack([tokens.sequence.double(), tokens.positions.double(), *(v.double() for v in values)])
    parts = gathered_columns(own, group)
    sequence, positions, *gathered = torch.cat(parts, dim=1)
    by_position = torch.argsort(positions, stable=True)
    in_text = by_position[torch.argsort(sequence[by_position], stable=True)]
    arguments = [found[in_text].to(value.dtype) for found, value in zip(gathered, values, strict=True)]
    weights, kept, sums = function(*arguments, sequence[in_text].long())
    begin = sum(part.shape[1] for part in parts[: group.rank()])
    mine = torch.argsort(in_text)[begin : begin + own.shape[1]]
    own_sums = {name: value[mine] if value.ndim else value / group.size() for name, value in sums.items()}
    return weights[mine], kept[mine], own_sums
