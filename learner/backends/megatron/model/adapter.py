"""Low-rank adapters (arXiv:2106.09685) of a linear layer of megatron-core, cut over tensor-parallel ranks.

Megatron-core has one layer for queries, keys and values, and one for gate and up projections. Each Hugging
Face layer in them has A and B of its own, so that the adapters are those of Hugging Face's model. Where more
ranks than there are key-value heads share a layer, a rank has rows of several of these layers, and none of
some: then every rank has all of each B, and computes with the rows of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from learner.backends.megatron.conversion.base import Layout, Shape
from learner.backends.megatron.core import (
    MegatronModule,
    TransformerConfig,
    make_sharded_tensors_for_checkpoint,
    tensor_parallel,
)
from learner.world.process_group import device

COLUMN, ROW, WHOLE = 0, 1, None
"""Dimension along which ranks share the weight of a layer: A is cut with its columns, B with its rows. Of a
layer that each rank has whole they are whole too."""
DIVIDED = {COLUMN: "lora_B", ROW: "lora_A", WHOLE: None}
"""Which of A and B ranks share."""


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Rows of a layer on this rank, where its ranks share rows of key-value heads."""

    of_layer: Mapping[str, Tensor]
    """Numbers of the rows of each Hugging Face layer that are here, by its last name."""
    order: Tensor
    """Where each output here is among those of the Hugging Face layers, one layer after another."""

    @classmethod
    def of(
        cls, layout: Layout, shape: Shape, outputs: Mapping[str, int], *, rank: int, ranks: int
    ) -> "SharedRows":
        """Return those of one of so many ranks; `outputs` are all of each layer."""
        sizes = list(outputs.values())
        ends = torch.tensor(sizes).cumsum(0)
        rows = [
            torch.arange(end - size, end)[:, None] for end, size in zip(ends.tolist(), sizes, strict=True)
        ]
        here = layout.merge(rows, shape)[:, 0].chunk(ranks)[rank]
        found, places = {}, []
        for name, size, end in zip(outputs, sizes, ends.tolist(), strict=True):
            [place] = torch.where((here >= end - size) & (here < end))
            found[name] = here[place] - (end - size)
            places.append(place)
        return cls(found, torch.cat(places).argsort())


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedLayer:
    """The layer that has adapters, on this rank."""

    cut: int | None
    """`COLUMN` where ranks share the outputs, `ROW` where they share the inputs, `WHOLE` where neither."""
    layout: Layout
    """How the outputs of Hugging Face's layers lie in those of this one."""
    shape: Shape
    """Sizes of the model, as far as this rank has it."""
    outputs: Mapping[str, int]
    """Outputs on this rank of each Hugging Face layer, by its last name; all of them with `shared`."""
    shared: SharedRows | None = None
    """Rows on this rank, where ranks share those of key-value heads."""


class LowRankPair(torch.nn.Module):
    """A and B of one Hugging Face layer."""

    def __init__(
        self, a: Tensor, outputs: int, *, cut: int | None, sequence: bool,
        group: torch.distributed.ProcessGroup, rows: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Begin with A, and B as 0. With `rows` B is whole, and has these of its rows' outputs here."""
        super().__init__()
        self._cut, self._sequence, self._group, self._rows = cut, sequence, group, rows
        self.lora_A = torch.nn.Parameter(a.contiguous())
        self.lora_B = torch.nn.Parameter(a.new_zeros(outputs, len(a)))
        for name, parameter in self.named_parameters():
            divided = rows is None and name == DIVIDED[cut]
            tensor_parallel.set_tensor_model_parallel_attributes(
                parameter, divided, cut if divided else -1, 1
            )
            of_all_tokens = (
                rows is not None and name == "lora_B"
            )  # its gradient, from the ranks that share it
            if sequence and not divided and not of_all_tokens:  # each rank has the gradient of its own tokens
                parameter.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(self, inputs: Tensor) -> Tensor:
        """Return B A x. A module is called, and not read: hooks of the data-parallel wrapper wait there for
        parameters that are still being gathered."""
        low = F.linear(inputs, self.lora_A)
        if self._cut == COLUMN:
            low = self._for_all_tokens(low)
        elif self._cut == ROW:
            low = self._sum(low)
        if self._rows is None:
            return F.linear(low, self.lora_B)
        whole = tensor_parallel.copy_to_tensor_model_parallel_region(self.lora_B, group=self._group)
        return F.linear(low, whole[self._rows])

    def _for_all_tokens(self, low: Tensor) -> Tensor:
        """Return it for all tokens; its gradient comes from the outputs of all ranks."""
        if self._sequence:
            return tensor_parallel.gather_from_sequence_parallel_region(low, group=self._group)  # type: ignore[no-any-return]
        return tensor_parallel.copy_to_tensor_model_parallel_region(low, group=self._group)  # type: ignore[no-any-return]

    def _sum(self, low: Tensor) -> Tensor:
        """Add up what ranks make of their inputs, as the layer itself does."""
        if self._sequence:
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(low, group=self._group)  # type: ignore[no-any-return]
        return tensor_parallel.reduce_from_tensor_model_parallel_region(low, group=self._group)  # type: ignore[no-any-return]


class Adapter(MegatronModule):  # type: ignore[misc]  # megatron-core is untyped
    """What is added to the outputs of one linear layer."""

    def __init__(
        self, config: TransformerConfig, layer: AdaptedLayer, first: Mapping[str, Tensor], scale: float,
        group: torch.distributed.ProcessGroup,
    ) -> None:  # fmt: skip
        """Begin with this rank's part of each A in `first`, by the last names of Hugging Face's layers."""
        super().__init__(config=config)
        self._layer = layer
        self._scale = scale
        self._group = group
        for name, a in first.items():
            part, sequence = a.to(device(), config.params_dtype), config.sequence_parallel
            rows = layer.shared.of_layer[name].to(device()) if layer.shared else None
            pair = LowRankPair(
                part, layer.outputs[name], cut=layer.cut, sequence=sequence, group=group, rows=rows
            )
            self.add_module(name, pair)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what to add to the outputs of the layer for `inputs`, [T, 1, n]."""
        found: dict[str, Tensor] = {name: pair(inputs) for name, pair in self.named_children()}
        sizes = self._layer.outputs
        if len(sizes) == 1:
            return self._scale * found.popitem()[1]
        if (shared := self._layer.shared) is not None:
            one = next(iter(found.values()))
            absent = {
                name: one.new_zeros(*one.shape[:-1], len(rows)) for name, rows in shared.of_layer.items()
            }
            together = torch.cat([(absent | found)[name] for name in sizes], -1)
            return self._scale * together[..., shared.order.to(together.device)]
        tokens = next(iter(found.values())).shape[0]  # with sequence parallelism more than in `inputs`
        rows = [
            found[name].flatten(0, 1).t() if name in found else inputs.new_zeros(size, tokens)
            for name, size in sizes.items()
        ]
        merged = self._layer.layout.merge(rows, self._layer.shape)
        return self._scale * merged.t()[:, None]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[Any] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return A and B as they lie in a checkpoint that any layout of ranks loads."""
        cut = self._layer.cut
        state = self.state_dict(prefix="", keep_vars=True)
        whole = self._layer.shared is not None
        cuts = {name: cut for name in state if not whole and name.rsplit(".", 1)[-1] == DIVIDED[cut]}
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, cuts, sharded_offsets,
            tp_group=self._group, dp_cp_group=(metadata or {})["dp_cp_group"],
        )  # fmt: skip
        return sharded
