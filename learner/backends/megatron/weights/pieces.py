"""Tells where this rank's rows of megatron-core's weights lie in Hugging Face's tensors."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from learner.backends.contract.backend import ExportedPiece
from learner.backends.megatron.conversion.base import Rule, Shape
from learner.backends.megatron.core.megatron_core import parallel_state
from learner.backends.megatron.weights.rank_weights import (
    EXPERT,
    Slice,
    part_shapes_of,
    slice_of,
    slices_of,
    tensor_group,
)
from learner.backends.megatron.weights.stacks import Places, file_name


def exported_pieces(
    chunks: Sequence[torch.nn.Module], shape: Shape, rules: Iterable[Rule], places: Places
) -> Iterator[ExportedPiece]:
    """Yield this rank's part of the weights of `rules`: ranks with the same slice divide its rows."""
    slices = slices_of(chunks)
    for rule in rules:
        mine, expert = slices.get(rule.megatron), EXPERT.search(rule.megatron) is not None
        if mine is None or (mine.dimension is None and tensor_group(expert).rank() > 0):
            continue
        numbers, starts, step = _rows(rule, mine, shape, places)
        known = int((numbers >= 0).sum())  # behind them there is what makes slices equally large
        place = _of_replica(known, expert)
        if place.start < place.stop:
            rows, dtype = mine.parameter.view(len(mine.parameter), -1), mine.parameter.dtype
            names = tuple(file_name(name, places) for name in rule.parts)
            yield ExportedPiece(rows[place], dtype, names, numbers[place], starts[place], step)


def _of_replica(rows: int, expert: bool) -> slice:
    """Return which of the rows of a slice are this rank's, of all that have the slice."""
    if expert:
        ranks, rank = (
            parallel_state.get_expert_data_parallel_world_size(),
            parallel_state.get_expert_data_parallel_rank(),
        )
    else:
        ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return slice(rows * rank // ranks, rows * (rank + 1) // ranks)


def _rows(rule: Rule, mine: Slice, shape: Shape, places: Places) -> tuple[Tensor, Tensor, int]:
    """Return for each row of a slice which part of the rule it is of, -1 for none, and where it begins there,
    and the distance of its elements.

    Layouts move whole rows, so they are given numbers of rows to merge."""
    wholes = dict(zip(rule.parts, part_shapes_of(rule, mine, shape), strict=True))
    counts = [whole[0] for whole in wholes.values()]
    ends = torch.tensor(counts).cumsum(0)
    numbered = {}
    for (name, whole), count, end in zip(wholes.items(), counts, ends.tolist(), strict=True):
        numbers = torch.arange(end - count, end) + 1  # 0 is what a slice has to be as large as others
        numbered[name] = numbers.view(count, *[1] * (len(whole) - 1))
    by_rows = replace(mine, dimension=None, ranks=1) if mine.dimension == 1 else mine
    row = slice_of(rule, by_rows, numbered, shape).flatten() - 1
    part = torch.bucketize(row.clamp(min=0), ends, right=True)
    steps = [_steps(name, whole, places) for name, whole in wholes.items()]
    offsets, of_row, of_column = (torch.tensor(values) for values in zip(*steps, strict=True))
    first = mine.rank * mine.sizes[1] if mine.dimension == 1 else 0
    inside = row - (ends - torch.tensor(counts))[part]
    starts = offsets[part] + inside * of_row[part] + first * of_column[part]
    return torch.where(row < 0, -1, part), starts, steps[0][2]


def _steps(name: str, whole: Sequence[int], places: Places) -> tuple[int, int, int]:
    """Return where a part's first element lies in files, and the distances of its rows and of the elements of
    a row."""
    if name not in places:
        return 0, prod(whole[1:]), 1
    place = places[name]
    view = place.of(torch.empty(place.stack.shape(whole), device="meta"))
    of_row, *of_column = view.stride()
    return int(view.storage_offset()), of_row, of_column[0] if of_column else 1
