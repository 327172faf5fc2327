"""Low-rank adapters (arXiv:2106.09685) of a linear layer of megatron-core, cut over tensor-parallel ranks,
with lengths of rows that are trained apart (arXiv:2402.09353) or without.

Megatron-core has one layer for queries, keys and values, and one for gate and up projections. Each Hugging
Face layer in them has A and B of its own, so that the adapters are those of Hugging Face's model. Where more
ranks than there are key-value heads share a layer, a rank has rows of several of these layers, and none of
some: then every rank has all of each B, and computes with the rows of its own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from learner.backends.megatron.conversion.base import Layout, Shape
from learner.backends.megatron.core.megatron_core import (
    MegatronModule,
    TransformerConfig,
    make_sharded_tensors_for_checkpoint,
    tensor_parallel,
)
from learner.backends.shared.lora import CHANGE, PartOfPair, excess, row_norms, squared_norms
from learner.distributed.process_group import device

COLUMN, ROW, WHOLE = 0, 1, None
"""Dimension along which ranks share the weight of a layer: A is cut with its columns, B with its rows. Of a
layer that each rank has whole they are whole too."""
DIVIDED = {COLUMN: ("lora_B", CHANGE), ROW: ("lora_A",), WHOLE: ()}
"""Which of the parameters ranks share."""


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Rows of a layer on this rank, where its ranks share rows of key-value heads."""

    of_layer: Mapping[str, Tensor]
    """Numbers of the rows of each Hugging Face layer that are here, by its last name."""
    places: Mapping[str, Tensor]
    """Where these rows are in the layer's weight here."""
    order: Tensor
    """Where each output here is among those of the Hugging Face layers, one layer after another."""

    @classmethod
    def of(
        cls, layout: Layout, shape: Shape, outputs: Mapping[str, int], *, rank: int, ranks: int
    ) -> "SharedRows":
        """Return the rows of one of so many ranks; `outputs` are all of each layer."""
        sizes = list(outputs.values())
        ends = torch.tensor(sizes).cumsum(0)
        rows = [
            torch.arange(end - size, end)[:, None] for end, size in zip(ends.tolist(), sizes, strict=True)
        ]
        here = layout.merge(rows, shape)[:, 0].chunk(ranks)[rank]
        found, places = {}, {}
        for name, size, end in zip(outputs, sizes, ends.tolist(), strict=True):
            [place] = torch.where((here >= end - size) & (here < end))
            found[name] = (here[place] - (end - size)).to(device())
            places[name] = place.to(device())
        return cls(found, places, torch.cat([*places.values()]).argsort())


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
    of_expert: bool = False
    """Whether the layer is a routed expert's: the dispatcher brings all tokens to the ranks that share it,
    and adds up what these return."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Formula:
    """What an adapter makes of A and B."""

    scale: float
    """Factor of B A."""
    weight_decomposed: bool
    """Whether the lengths of rows are trained apart."""


class LowRankPair(torch.nn.Module):
    """A and B of one Hugging Face layer, and the change of the lengths of its rows where that is trained."""

    def __init__(
        self, a: Tensor, outputs: int, formula: Formula, *, cut: int | None, sequence: bool,
        group: torch.distributed.ProcessGroup, rows: Tensor | None = None, of_expert: bool = False,
    ) -> None:  # fmt: skip
        """Begin with A, and all else as 0. With `rows` ranks share no rows of B, and those are computed
        with here."""
        super().__init__()
        self._formula = formula
        self._cut, self._group, self._rows, self._of_expert = cut, group, rows, of_expert
        self.lora_A = torch.nn.Parameter(a.contiguous())
        self.lora_B = torch.nn.Parameter(a.new_zeros(outputs, len(a)))
        self.lora_magnitude_change: torch.nn.Parameter | None = None
        if formula.weight_decomposed:
            self.lora_magnitude_change = torch.nn.Parameter(a.new_zeros(outputs))
        for name, parameter in self.named_parameters():
            divided = rows is None and name in DIVIDED[cut]
            if of_expert:
                _mark_of_expert(parameter, cut if divided else None, group)
                continue
            tensor_parallel.set_tensor_model_parallel_attributes(
                parameter, divided, cut if divided else -1, 1
            )
            summed = rows is not None and name != "lora_A"  # the gradient of `_here` is that of all tokens
            if sequence and not divided and not summed:  # each rank has the gradient of its own tokens
                parameter.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return A and B as this rank computes with them, and what the lengths of rows make of outputs, less
        1; None where that is nothing.

        A module is called, and not read: hooks of the data-parallel wrapper wait there for parameters that
        are still being gathered. `weight` is the frozen one of the rows here, which may have several
        dimensions."""
        a, b = self._here("lora_A", self.lora_A), self._here("lora_B", self.lora_B)
        if self.lora_magnitude_change is None:
            return a, b, None
        squares = squared_norms(weight, a, b, self._formula.scale)
        if self._cut == ROW:  # ranks share the columns
            torch.distributed.all_reduce(squares, group=self._group)
        return a, b, excess(squares, self._here(CHANGE, self.lora_magnitude_change))

    def _here(self, name: str, parameter: Tensor) -> Tensor:
        if self._of_expert and self._group.size() > 1 and name not in DIVIDED[self._cut]:
            # Each rank has the gradient of its part of the outputs, or of the inputs.
            return tensor_parallel.copy_to_tensor_model_parallel_region(parameter, group=self._group)  # type: ignore[no-any-return]
        if self._rows is None or name == "lora_A":
            return parameter
        whole = tensor_parallel.copy_to_tensor_model_parallel_region(parameter, group=self._group)
        return whole[self._rows]  # type: ignore[no-any-return]


def _mark_of_expert(parameter: Any, cut: int | None, group: torch.distributed.ProcessGroup) -> None:
    """Mark a parameter of an expert's adapter, which the ranks of `group` share along `cut`, or all have.

    Megatron-core's gradient norm takes what does not count as divided from the first tensor-parallel rank
    alone. Other ranks may have other experts, so that it counts as divided, and where ranks that share an
    expert all have it, as another's on all of them but the first."""
    parameter.allreduce = False
    tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, -1 if cut is None else cut, 1)
    parameter.shared = cut is None and group.rank() > 0


class Adapter(MegatronModule):  # type: ignore[misc]  # megatron-core is untyped
    """What one linear layer computes beside its frozen weight."""

    def __init__(
        self, config: TransformerConfig, layer: AdaptedLayer, first: Mapping[str, Tensor], formula: Formula,
        group: torch.distributed.ProcessGroup,
    ) -> None:  # fmt: skip
        """Begin with this rank's part of each A in `first`, by the last names of Hugging Face's layers."""
        super().__init__(config=config)
        self._layer = layer
        self._formula = formula
        self._group = group
        for name, a in first.items():
            part, sequence = a.to(device(), config.params_dtype), config.sequence_parallel
            rows = layer.shared.of_layer[name] if layer.shared else None
            pair = LowRankPair(
                part, layer.outputs[name], formula, cut=layer.cut, sequence=sequence, group=group, rows=rows,
                of_expert=layer.of_expert,
            )  # fmt: skip
            self.add_module(name, pair)

    def forward(self, inputs: Tensor, outputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the outputs, [T, 1, m], of the layer with its adapter; of an expert's, [T, m].

        Args:
            inputs: those of the layer, [T, 1, n], or [T, n].
            outputs: what the layer makes of them.
            weight: the layer's.
            bias: what `outputs` have in them, besides what the weight makes of the inputs."""
        found = self.pairs(weight)
        # Small matrices are put together, and not what they make of all tokens.
        low = self._exchanged(F.linear(inputs, torch.cat([a for a, _, _ in found.values()])))
        b = self._together(dict(zip(found, side_by_side([b for _, b, _ in found.values()]), strict=True)))
        flat = torch.addmm(outputs.flatten(0, -2), low.flatten(0, -2), b.t(), alpha=self._formula.scale)
        outputs = flat.view_as(outputs)
        if not self._formula.weight_decomposed:
            return outputs
        rows = {name: excess[:, None] for name, (_, _, excess) in found.items() if excess is not None}
        lengths = self._together(rows)[:, 0]
        linear = outputs if bias is None else outputs - bias
        return torch.addcmul(outputs, linear, lengths.to(outputs.dtype))

    def pairs(self, weight: Tensor) -> dict[str, tuple[Tensor, Tensor, Tensor | None]]:
        """Return what `LowRankPair.forward` does of each Hugging Face layer that has an adapter, by its last
        name; `weight` is the layer's."""
        weights = self._weights(weight)
        return {name: pair(weights[name]) for name, pair in self.named_children()}

    @torch.no_grad()
    def part(self, name: str, weight: Tensor, lengths: Callable[[Tensor, Tensor], Tensor]) -> PartOfPair:
        """Return what this rank needs for its part of the weight of a Hugging Face layer, by its last name.
        All ranks that share the layer call this.

        Args:
            name: of the Hugging Face layer.
            weight: the layer's.
            lengths: makes lengths of rows of their change and their numbers."""
        pair, cut, ranks = self.get_submodule(name), self._layer.cut, self._group.size()
        assert isinstance(pair, LowRankPair)
        a, b, change = pair.lora_A.detach(), pair.lora_B.detach(), pair.lora_magnitude_change
        divided = cut == COLUMN and self._layer.shared is None
        first, found, norms = self._group.rank() * len(b) if divided else 0, None, None
        if change is not None:
            found = lengths(change.detach(), torch.arange(first, first + len(b)))
        if change is not None and cut == ROW and ranks > 1:
            whole, whole_a = (_all_columns(each, self._group) for each in (weight, a))
            norms = row_norms(whole.float() + self.scale * (b.float() @ whole_a.float()))
        return PartOfPair(
            a=a, b=b, first=first, outputs=len(b) * (ranks if divided else 1),
            inputs=a.shape[1] * (ranks if cut == ROW else 1), lengths=found, norms=norms,
        )  # fmt: skip

    @property
    def outputs(self) -> Mapping[str, int]:
        """Return how many outputs each Hugging Face layer has here, in their order in an expert's layer."""
        return self._layer.outputs

    @property
    def scale(self) -> float:
        return self._formula.scale

    @property
    def ranks(self) -> Mapping[str, int | None]:
        """Return the rank of the adapter of each Hugging Face layer; None with lengths of rows."""
        return {
            name: None if self._formula.weight_decomposed else len(pair.lora_A)
            for name, pair in self.named_children()
        }

    def _exchanged(self, low: Tensor) -> Tensor:
        group, sequence = self._group, self.config.sequence_parallel
        if self._layer.of_expert:
            return low
        if self._layer.cut == COLUMN and sequence:
            low = tensor_parallel.gather_from_sequence_parallel_region(low, group=group)
        elif self._layer.cut == COLUMN:
            low = tensor_parallel.copy_to_tensor_model_parallel_region(low, group=group)
        elif self._layer.cut == ROW and sequence:
            low = tensor_parallel.reduce_scatter_to_sequence_parallel_region(low, group=group)
        elif self._layer.cut == ROW:
            low = tensor_parallel.reduce_from_tensor_model_parallel_region(low, group=group)
        return low

    def _weights(self, weight: Tensor) -> Mapping[str, Tensor]:
        """Return the rows here of each Hugging Face layer, in the shape in which they lie."""
        layer = self._layer
        if len(layer.outputs) == 1 or not self._formula.weight_decomposed:
            return dict.fromkeys(layer.outputs, weight)
        if layer.shared is not None:
            return {name: weight[places] for name, places in layer.shared.places.items()}
        return dict(zip(layer.outputs, layer.layout.split(weight, layer.shape), strict=True))

    def _together(self, found: Mapping[str, Tensor]) -> Tensor:
        """Return rows of Hugging Face's layers, [outputs, k] each, as the layer has them, [m, k]; those of
        layers without an adapter are 0."""
        layer, one = self._layer, next(iter(found.values()))
        if len(layer.outputs) == 1:
            return one
        shared = layer.shared
        sizes = {n: len(rows) for n, rows in shared.of_layer.items()} if shared else layer.outputs
        rows = [found[n] if n in found else one.new_zeros(size, one.shape[1]) for n, size in sizes.items()]
        return torch.cat(rows)[shared.order] if shared else layer.layout.merge(rows, layer.shape)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[Any] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        cut = self._layer.cut
        state = self.state_dict(prefix="", keep_vars=True)
        whole = self._layer.shared is not None
        cuts = {name: cut for name in state if not whole and name.rsplit(".", 1)[-1] in DIVIDED[cut]}
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, cuts, sharded_offsets,
            tp_group=self._group, dp_cp_group=(metadata or {})["dp_cp_group"],
        )  # fmt: skip
        return sharded


def _all_columns(part: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """Return a matrix whose columns the ranks of a group share. Each of them calls this."""
    parts = [torch.empty_like(part) for _ in range(group.size())]
    torch.distributed.all_gather(parts, part.detach().contiguous(), group=group)
    return torch.cat(parts, dim=1)


def side_by_side(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Give each matrix, [..., rows, columns], columns of its own among those of all, with zeros in the
    others'."""
    widths = [matrix.shape[-1] for matrix in matrices]
    return [
        F.pad(matrix, (sum(widths[:number]), sum(widths[number + 1 :])))
        for number, matrix in enumerate(matrices)
    ]
