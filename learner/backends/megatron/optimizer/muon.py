"""Muon in megatron-core's optimizers, whose own needs another package and no distributed optimizer.

A matrix is one of Hugging Face's: queries, keys and values of a layer are three, gate and up are two, and
each expert has its own. It is whole when it is orthogonalised, however tensor-parallel ranks cut it."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from bus.errors import ConfigError
from learner.backends.megatron.conversion.base import Rule, Shape
from learner.backends.megatron.conversion.families import family_of, shape_of
from learner.backends.megatron.core.megatron_core import (
    DistributedOptimizer,
    MegatronOptimizer,
    parallel_state,
)
from learner.backends.megatron.model.lora import LINEAR
from learner.backends.megatron.optimizer.shards import main_shards
from learner.backends.megatron.weights.rank_weights import (
    EXPERT,
    Cut,
    data_parallel_rank,
    global_name,
    parts_of,
    slice_of,
    slices_of,
)
from learner.backends.update.matrix_exchange import MatrixExchange, Piece
from learner.backends.update.muon import (
    MOMENTUM,
    SECOND,
    MuonAdamW,
    begin_with_zeros,
    muon_steps,
    refuse_none_trained,
)
from learner.distributed.process_group import gathered


@dataclass(frozen=True)
class CutMatrices:
    """A tensor of megatron-core's model, of which tensor-parallel ranks have slices."""

    rule: Rule
    cut: Cut
    """This rank's."""
    shape: Shape

    @property
    def slice_shapes(self) -> list[tuple[int, ...]]:
        return [self.cut.sizes] * self.cut.ranks

    @property
    def _cuts(self) -> list[Cut]:
        return [replace(self.cut, rank=rank) for rank in range(self.cut.ranks)]

    def matrices(self, slices: Sequence[Tensor]) -> list[Tensor]:
        cut_slices = list(zip(slices, self._cuts, strict=True))
        return [matrix for _, matrix in parts_of(self.rule, cut_slices, self.shape)]

    def slices(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        if self.rule.layout.mixes(self.shape, self.cut.ranks):  # merges the matrices once for all ranks
            return list(self.rule.layout.merge(matrices, self.shape).chunk(self.cut.ranks))
        state = dict(zip(self.rule.parts, matrices, strict=True))
        return [slice_of(self.rule, cut, state, self.shape) for cut in self._cuts]


class _Found(NamedTuple):
    name: str
    """Name of the matrix in the whole model."""
    stored: CutMatrices


def refuse_fused_matrices(hf_config: PretrainedConfig) -> None:
    """Raise `ConfigError` where files of a model have several matrices in one tensor."""
    if shape_of(hf_config).delta is not None:
        raise ConfigError(
            f"optimizer.matrices=muon: files of this model, a {hf_config.model_type}, have the matrices of "
            "linear attention, and those of queries and gates, in one tensor: set it to adamw"
        )


@torch.no_grad()
def add_muon(
    optimizer: MegatronOptimizer, chunks: Sequence[Any], hf_config: PretrainedConfig, dtype: torch.dtype
) -> None:
    """Let Muon update the matrices of the layers in `dtype`, with fresh state. Every rank calls this. Raises
    `ConfigError` where no matrix is trained, and where files have several in one tensor."""
    refuse_fused_matrices(hf_config)
    found = _found_in(chunks, hf_config)
    mine: list[Piece] = []
    tensors: dict[str, CutMatrices] = {}
    for part in optimizer.chained_optimizers:
        part.optimizer.__class__ = MuonAdamW
        part.optimizer.parts = {}
        for piece, main, stored in _pieces(part, found):
            mine.append(piece)
            part.optimizer.parts[piece.tensor], tensors[piece.tensor] = main, stored
    pieces = [piece for of_rank in gathered(mine) for piece in of_rank]
    refuse_none_trained(pieces)
    for part in optimizer.chained_optimizers:
        # Experts have an optimizer of their own, which on ranks of other stages has nothing to do.
        kinds = {_is_of_expert(name) for name in part.optimizer.parts}
        exchanged = [piece for piece in pieces if _is_of_expert(piece.tensor) in kinds]
        part.optimizer.exchange = MatrixExchange(exchanged, tensors, partial(muon_steps, dtype=dtype))
        begin_with_zeros(part.optimizer)
        if isinstance(part, DistributedOptimizer):
            _save_no_second_moment(part, found)


def _is_of_expert(name: str) -> bool:
    return EXPERT.search(name) is not None


def _found_in(chunks: Sequence[Any], hf_config: PretrainedConfig) -> dict[torch.nn.Parameter, _Found]:
    shape = shape_of(hf_config)
    rules = {rule.megatron: rule for rule in family_of(hf_config).rules(shape)}
    cuts = slices_of(chunks)
    found = {}
    for chunk in chunks:
        for local_name, parameter in chunk.named_parameters():
            name = global_name(chunk, local_name)
            if LINEAR.search(name):
                mine = cuts[name]
                cut = Cut(mine.dimension, mine.ranks, mine.rank, mine.sizes)
                found[parameter] = _Found(name, CutMatrices(rules[name], cut, shape))
    return found


def _pieces(
    part: Any, found: Mapping[torch.nn.Parameter, _Found]
) -> Iterator[tuple[Piece, Tensor, CutMatrices]]:
    for parameter, main, start in main_shards(part):
        if parameter not in found:
            continue
        name, stored = found[parameter]
        # Ranks that have all of a tensor update it each by itself, in a distributed optimizer with others.
        replica = () if isinstance(part, DistributedOptimizer) else (data_parallel_rank(name),)
        if stored.cut.dimension is None:
            replica = (*replica, parallel_state.get_tensor_model_parallel_rank())
        name = f"{name} {replica}"
        yield Piece(name, dist.get_rank(), stored.cut.rank, start, start + main.numel()), main, stored


def _save_no_second_moment(part: DistributedOptimizer, matrices: Container[torch.nn.Parameter]) -> None:
    """Have megatron-core, which wants two moments of each parameter, save and load those that there are."""
    states, sharded = part._get_main_param_and_optimizer_states, part.sharded_param_state_fully_reshardable
    saved = [parameter for buffer in part.buffers for parameter in buffer.param_index_map]

    def states_with_both(parameter: torch.nn.Parameter) -> dict[str, Tensor]:
        found: dict[str, Tensor] = states(parameter)
        zero = torch.zeros((), device=found[MOMENTUM].device)
        return {SECOND: zero.expand_as(found[MOMENTUM]), **found}  # takes no memory

    def sharded_without(*args: Any, **settings: Any) -> dict[int, dict[str, Any]]:
        state: dict[int, dict[str, Any]] = sharded(*args, **settings)
        for number, parameter in enumerate(saved):
            if parameter in matrices:
                del state[number][SECOND]
        return state

    part._get_main_param_and_optimizer_states = states_with_both
    part.sharded_param_state_fully_reshardable = sharded_without
