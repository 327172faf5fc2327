"""The weights leave the model under the names and in the layout that Hugging Face files have."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from learner.backends.contract.backend import NO_TENSORS, Exported, ExportedPiece
from learner.backends.megatron.conversion.base import Rule, Shape
from learner.backends.megatron.conversion.families import family_of, float32_weights, shape_of
from learner.backends.megatron.core.megatron_core import MegatronModule, parallel_state
from learner.backends.megatron.weights.rank_weights import (
    EXPERT,
    Holders,
    Slice,
    exported_shapes,
    find_holders,
    part_shapes_of,
    slice_of,
    slices_of,
    stream_hf_weights,
    tensor_group,
    whole_on_rank_0,
)
from learner.backends.megatron.weights.stacks import Places, file_name, places_in, stacks_of
from learner.model_directories.lazy_weights import SomeWeights


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
        known = int((numbers >= 0).sum())  # behind the known rows lies what makes slices equally large
        place = _of_replica(known, expert)
        if place.start < place.stop:
            rows, dtype = mine.parameter.view(len(mine.parameter), -1), mine.parameter.dtype
            names = tuple(file_name(name, places) for name in rule.parts)
            yield ExportedPiece(rows[place], dtype, names, numbers[place], starts[place], step)


def _of_replica(rows: int, expert: bool) -> slice:
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


class WeightExport:
    """Gathers weights at rank 0. Nothing may write the parameters any more (`Trainer.finish_gathering`)."""

    def __init__(
        self, chunks: Sequence[MegatronModule], hf_config: PretrainedConfig, beside: SomeWeights,
        head: Sequence[Rule] = (),
    ) -> None:  # fmt: skip
        """Export `beside` with the model's weights, as it is.

        With the rules of a `head` its weights are among those of `chunks`, and copies of what it shares with
        the model are exported as the model has them now."""
        self._chunks = chunks
        self._rules: list[Rule] | None = None
        """Rules of the model and its head; None without one."""
        if head:
            family, shape = family_of(hf_config), shape_of(hf_config)
            copies = [rule for rule in family.head_copies(shape) if rule.parts[0] in beside]
            self._rules = [*family.rules(shape), *head, *copies]
            exported = {part for rule in self._rules for part in rule.parts}
            beside = SomeWeights(beside, [name for name in beside if name not in exported])
        self._beside = beside
        self._hf_config = hf_config
        self._parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        self._known_holders: Holders | None = None
        self._exported: Exported | None = None
        self._addresses: list[int] = []
        """Says where the parameters lay when `_exported` was made."""

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights one after another on rank 0, each good until the next; every rank exhausts it."""
        yield from self.trained()
        yield from self._others()

    def trained(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of the model, as `stream` does."""
        return stream_hf_weights(self._chunks, self._hf_config, self._holders(), rules=self._rules)

    def _others(self) -> Iterator[tuple[str, Tensor]]:
        if dist.get_rank() == 0:
            yield from self._beside.items()

    def copies(self) -> dict[str, Tensor]:
        """Copies of all weights on rank 0; nothing on the others."""
        return {name: part.clone(memory_format=torch.contiguous_format) for name, part in self.stream()}

    def views(self) -> Exported:
        """Return the weights where they lie; every rank takes its part."""
        addresses = [parameter.data_ptr() for parameter in self._parameters]
        if self._exported is None or self._addresses != addresses:
            holders, rules, alone = self._holders(), self._rules, dist.get_world_size() == 1
            here = whole_on_rank_0(self._chunks, self._hf_config, rules=rules) if alone else {}
            shapes = exported_shapes(self._hf_config, holders, rules=rules)
            rest = NO_TENSORS
            if alone and len(here) < len(shapes):
                rest = partial(
                    stream_hf_weights, self._chunks, self._hf_config, holders, without=here, rules=rules
                )
            self._addresses = addresses
            self._exported = Exported(
                shapes | {name: self._beside.spec(name).shape for name in self._beside},
                here,
                rest,
                float32_weights(rules or self._model_rules()) | self._beside.dtypes(),
                self._others,
                None if alone else list(self._pieces()),
            )
        return self._exported

    def _pieces(self) -> Iterator[ExportedPiece]:
        places = {} if self._rules is not None else places_in(stacks_of(self._hf_config))
        rules = self._rules or self._model_rules()
        return exported_pieces(self._chunks, shape_of(self._hf_config), rules, places)

    def _model_rules(self) -> Iterator[Rule]:
        return family_of(self._hf_config).rules(shape_of(self._hf_config))

    def _holders(self) -> Holders:
        """Return which rank has which weight; to find out is a collective, once."""
        self._known_holders = self._known_holders or find_holders(self._chunks)
        return self._known_holders
