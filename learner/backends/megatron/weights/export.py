"""The weights leave the model under the names and in the layout that Hugging Face files have."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from learner.backends.contract.backend import NO_TENSORS, Exported, ExportedPiece
from learner.backends.megatron.conversion.base import Rule
from learner.backends.megatron.conversion.families import family_of, float32_weights, shape_of
from learner.backends.megatron.core.megatron_core import MegatronModule
from learner.backends.megatron.weights.pieces import exported_pieces
from learner.backends.megatron.weights.rank_weights import (
    Holders,
    exported_shapes,
    find_holders,
    stream_hf_weights,
    whole_on_rank_0,
)
from learner.backends.megatron.weights.stacks import places_in, stacks_of
from learner.model_directories.lazy_weights import SomeWeights


class WeightExport:
    """Gathers weights at rank 0. The parameters must be settled (`Trainer.settle_parameters`) before."""

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
        """Yield those of the model, as `stream` does."""
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
