"""Adapters on the linear layers of a model of transformers."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from bus.errors import ConfigError
from learner.backends.contract.backend import NO_TENSORS, Exported, ExportedPiece, TrainedAdapters
from learner.backends.contract.merged_pieces import merged_pieces
from learner.backends.fsdp.expert_adapters import ExpertStack, adapt_experts, expert_stacks, pairs_name
from learner.backends.fsdp.names import FileNames
from learner.backends.fsdp.weights import first_row, local, whole
from learner.backends.shared.lora import (
    CHANGE,
    FrozenBase,
    PartOfPair,
    excess,
    first_a,
    merged_stream,
    squared_norms,
    targeted,
)
from learner.backends.shared.score_head import SCORE_HEAD
from learner.config.lora import LoraConfig
from learner.model_directories.lazy_weights import State
from storage.model_files.adapter_names import PREFIX, WEIGHT, adapter_names, magnitude_name


@dataclass(frozen=True, slots=True)
class Adapted:
    """Rows of a weight of the model that have an adapter, or as many adapters as there are experts."""

    weight: str
    """Name of the weight in the model."""
    parameters: str
    """Begins the names of A and B in the model."""
    end: str
    """Ends the names."""
    layers: tuple[str, ...]
    """Names in files of the linear layers: one, or one for each expert."""
    of_experts: bool = False
    """Whether the rows are those of all experts, whose A and B have one dimension more."""

    @property
    def name(self) -> str:
        """Return the name that the adapter, or those of all experts, have in checkpoints."""
        first = self.layers[0]
        return f"{self.weight}.{first.rpartition('.')[2]}" if self.of_experts else first


def add_adapters(
    hf_model: PreTrainedModel, names: FileNames, config: LoraConfig, dtype: torch.dtype
) -> list[Adapted]:
    """Freeze all weights of a model but the head of a reward model, and give its linear layers float32
    adapters; return what has one.

    Nobody updates the frozen weights, so they lie in memory as `dtype`, in which the model computes. They
    mean nothing yet. Raises `ConfigError` for targets that are not there, and for a layer that files know by
    another name."""
    for name, parameter in hf_model.named_parameters():
        if name != SCORE_HEAD:
            parameter.requires_grad_(False)
            parameter.data = torch.empty_like(parameter, dtype=dtype)
    layers, stacks = dict(_linear_layers(hf_model)), list(expert_stacks(hf_model, names))
    of_experts = [name for stack in stacks for several in stack.projections.values() for name in several]
    chosen = targeted(config, list(layers), of_experts)
    linear = [name for name in chosen if name in layers]
    for name in linear:
        if list(names.tensors[name + WEIGHT].files) != [name + WEIGHT]:
            raise ConfigError(
                f"learner.lora.targets: model files know {name} by another name, by which nobody would find "
                "its adapter; name other layers"
            )
        _add_adapter(layers[name], name, config)
    adapted = [Adapted(name + WEIGHT, f"{name}.lora_", WEIGHT, (name,)) for name in linear]
    return [*adapted, *_adapted_experts(hf_model, stacks, set(chosen), config)]


def _adapted_experts(
    hf_model: PreTrainedModel, stacks: Sequence[ExpertStack], chosen: set[str], config: LoraConfig
) -> Iterator[Adapted]:
    """Give the chosen projections of experts adapters, and yield them.

    Raises `ConfigError` for some experts of a layer alone. Settings with lengths of rows (DoRA) never come
    here (learner/config/backend.py)."""
    for module in dict.fromkeys(stack.module for stack in stacks):
        here = [stack for stack in stacks if stack.module == module]
        found = []
        for stack in here:
            for projection, layers in stack.projections.items():
                if some := chosen.intersection(layers):
                    _refuse_some_experts(config, projection, layers, some)
                    begins = f"{module}.{pairs_name(projection)}.lora_"
                    found.append(Adapted(f"{module}.{stack.tensor}", begins, "", layers, of_experts=True))
        if found:
            projections = {each.layers[0].rpartition(".")[2] for each in found}
            adapt_experts(hf_model.get_submodule(module), here, projections, config.rank, config.scale)
        yield from found


def _refuse_some_experts(config: LoraConfig, projection: str, layers: Sequence[str], some: set[str]) -> None:
    if len(some) < len(layers):
        raise ConfigError(
            f"learner.lora.targets={list(config.targets)}: some experts of a layer alone have an adapter of "
            f"{projection}, as {min(some)}, which learner.backend=fsdp does not train: name {projection}"
        )


def _linear_layers(hf_model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Linear]]:
    """Yield the linear layers of the transformer blocks; the output layer is fused with the loss.

    One of a single output is a gate, as that of a shared expert: like a router it has no adapter, as on
    Megatron."""
    kinds = hf_model._no_split_modules or ()
    for block, module in hf_model.named_modules():
        if type(module).__name__ in kinds:
            for name, layer in module.named_modules():
                if isinstance(layer, torch.nn.Linear) and layer.out_features > 1:
                    yield f"{block}.{name}", layer


@torch.no_grad()
def _add_adapter(layer: torch.nn.Linear, name: str, config: LoraConfig) -> None:
    a = torch.nn.Linear(layer.in_features, config.rank, bias=False)
    b = torch.nn.Linear(config.rank, layer.out_features, bias=False)
    a.weight.copy_(first_a(name, config.rank, layer.in_features))
    b.weight.zero_()
    layer.lora_A, layer.lora_B = a, b
    scale = config.scale

    def add(_: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output.add(b(a(inputs[0])), alpha=scale)

    layer.register_forward_hook(add)
    if config.weight_decomposed:
        change = torch.nn.Parameter(torch.zeros(layer.out_features))
        layer.register_parameter(CHANGE, change)

        def scale_rows(layer: torch.nn.Linear, _: tuple[Tensor, ...], output: Tensor) -> Tensor:
            squares = squared_norms(layer.weight, a.weight, b.weight, scale)
            factor = excess(squares, getattr(layer, CHANGE)).to(output.dtype)
            return torch.addcmul(output, output if layer.bias is None else output - layer.bias, factor)

        layer.register_forward_hook(scale_rows)  # behind the other


class LayerAdapter(NamedTuple):
    """What a weight, or rows of it, have, sharded like all parameters."""

    of: Adapted
    a: Tensor
    b: Tensor
    change: Tensor | None
    """How the lengths of the weight's rows differ from those of the frozen ones; None where that is not
    trained."""

    def named(self) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Yield A and B, each with its names in files: of an expert after another, or its one."""
        names = zip(*(adapter_names(layer + WEIGHT) for layer in self.of.layers), strict=True)
        yield from zip(names, (self.a, self.b), strict=True)

    def apart(self, names: Sequence[str], tensor: Tensor) -> dict[str, Tensor]:
        """Return what files have of A or B by these names: it, or a part of it for each expert."""
        return dict(zip(names, tensor.unbind() if self.of.of_experts else (tensor,), strict=True))


def _rows_of(names: Sequence[str], tensor: Tensor, dtype: torch.dtype) -> Iterator[ExportedPiece]:
    """Yield this rank's rows of a tensor, if it has any: of one in files, or of one for each expert."""
    mine, (count, width) = local(tensor), tensor.shape[-2:] if tensor.dim() > 1 else (len(tensor), 1)
    if not mine.numel():
        return
    rows = mine.view(-1, width)
    first = first_row(tensor) * (count if tensor.dim() > 2 else 1)
    numbers = torch.arange(first, first + len(rows))
    yield ExportedPiece(rows, dtype, names, numbers // count, numbers % count * width)


class ModelAdapters:
    """The adapters of a sharded model."""

    def __init__(
        self, config: LoraConfig, adapted: Sequence[Adapted], base: State, tensors: dict[str, Tensor],
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """Take the adapters away from the `tensors` of the model, of which the weights of `base` are left. It
        computes in `dtype`."""
        self.config = config
        self.base = FrozenBase(config, base, dtype)
        self._adapters: list[LayerAdapter] = []
        self.tensors: dict[str, Tensor] = {}
        """What is trained, A and B of all layers and the head of a reward model, by peft's names."""
        for each in adapted:
            a, b = (tensors.pop(f"{each.parameters}{letter}{each.end}") for letter in "AB")
            change = tensors.pop(f"{each.layers[0]}.{CHANGE}", None)
            self._adapters.append(LayerAdapter(each, a, b, change))
            self.tensors |= zip(adapter_names(each.name), (a, b), strict=True)
            if change is not None:
                self.tensors[f"{PREFIX}{each.name}.{CHANGE}"] = change
        self._head = tensors.get(SCORE_HEAD)
        if self._head is not None:
            self.tensors[PREFIX + SCORE_HEAD] = self._head
        self._layers = dict.fromkeys(layer for each in adapted for layer in each.layers)
        self.weights = {each.weight for each in adapted}
        """Names in the model of the weights that have adapters."""

    @torch.no_grad()
    def switch_off(self) -> None:
        for adapter in self._adapters:
            local(adapter.b).zero_()
            if adapter.change is not None:
                local(adapter.change).zero_()

    def merged(
        self, weights: Iterator[tuple[str, Tensor]], dtype: torch.dtype
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield on rank 0 what weights and their adapters make together, which compute in `dtype`. Every rank
        exhausts this."""
        return merged_stream(weights, self._streamed(dtype), self._layers, self.config.scale)

    def merged_pieces(self, pieces: Sequence[ExportedPiece], dtype: torch.dtype) -> list[ExportedPiece]:
        """Return this rank's rows of the weights, of which what they and adapters make together is published.
        Every rank calls this: each is given A of all layers, but for experts."""
        pairs = {name: pair for adapter in self._adapters for name, pair in self._parts(adapter, dtype)}
        return merged_pieces(pieces, pairs, self.config.scale)

    def _parts(self, adapter: LayerAdapter, dtype: torch.dtype) -> Iterator[tuple[str, PartOfPair]]:
        """Yield what this rank needs for its rows of a weight, by the names of files."""
        layers, b, first = adapter.of.layers, local(adapter.b).to(dtype), first_row(adapter.b)
        (outputs, _), inputs = adapter.b.shape[-2:], adapter.a.shape[-1]
        if adapter.of.of_experts:
            of_experts = zip(local(adapter.a).to(dtype), b, strict=True)
            for layer, (a_of_expert, b_of_expert) in zip(layers[first:], of_experts, strict=False):
                yield (
                    layer + WEIGHT,
                    PartOfPair(a=a_of_expert, b=b_of_expert, first=0, outputs=outputs, inputs=inputs),
                )
            return
        lengths, a = None, whole(adapter.a, dtype)
        if adapter.change is not None:
            rows = torch.arange(first, first + len(b))
            lengths = self.base.magnitude(adapter.of.weight, local(adapter.change).to(dtype), rows)
        yield (
            adapter.of.weight,
            PartOfPair(a=a, b=b, first=first, outputs=outputs, inputs=inputs, lengths=lengths),
        )

    def exported(self, dtype: torch.dtype) -> Exported:
        """Return the adapters, to publish them alone, as the `dtype` in which they are computed with; the
        lengths of rows are float32."""
        here: dict[str, Tensor] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        exact: dict[str, torch.dtype] = {}
        views = dist.get_world_size() == 1 and dtype == torch.float32
        for adapter in self._adapters:
            for names, tensor in adapter.named():
                shapes |= dict.fromkeys(names, tuple(tensor.shape[-2:]))
                exact |= dict.fromkeys(names, dtype)
                here |= adapter.apart(names, local(tensor)) if views else {}
            if adapter.change is not None:
                name = magnitude_name(adapter.of.weight)
                shapes[name], exact[name] = tuple(adapter.change.shape), torch.float32
        if self._head is not None:
            shapes[PREFIX + SCORE_HEAD], exact[PREFIX + SCORE_HEAD] = tuple(self._head.shape), dtype
        if dist.get_world_size() > 1:
            return Exported(shapes, {}, NO_TENSORS, exact, pieces=list(self._pieces(dtype)))
        return Exported(shapes, here, partial(self._streamed, dtype, without=here), exact)

    def _pieces(self, dtype: torch.dtype) -> Iterator[ExportedPiece]:
        """Yield this rank's rows of all that is trained, computed with in `dtype`."""
        for adapter in self._adapters:
            for names, tensor in adapter.named():
                yield from _rows_of(names, tensor, dtype)
            if adapter.change is not None:
                weight = adapter.of.weight
                for piece in _rows_of([magnitude_name(weight)], adapter.change, dtype):
                    change = piece.rows[:, 0].to(dtype)
                    lengths = self.base.magnitude(weight, change, piece.starts)
                    yield replace(piece, rows=lengths[:, None], dtype=torch.float32)
        if self._head is not None:
            yield from _rows_of([PREFIX + SCORE_HEAD], self._head, dtype)

    def _streamed(self, dtype: torch.dtype, *, without: Container[str] = ()) -> Iterator[tuple[str, Tensor]]:
        for adapter in self._adapters:
            for names, tensor in adapter.named():
                if names[0] in without:
                    continue
                found = whole(tensor, dtype)
                if dist.get_rank() == 0:
                    yield from adapter.apart(names, found).items()
            if adapter.change is not None:
                found, weight = whole(adapter.change, dtype), adapter.of.weight
                if dist.get_rank() == 0:
                    yield magnitude_name(weight), self.base.magnitude(weight, found)
        if self._head is not None:
            found = whole(self._head, dtype)
            if dist.get_rank() == 0:
                yield PREFIX + SCORE_HEAD, found

    def described(self, exact: Mapping[str, torch.dtype]) -> TrainedAdapters:
        """Return what others than this backend need of them; `exact` weights have dtypes of their own."""
        streamed = partial(self._streamed, torch.float32)
        whole = () if self._head is None else (SCORE_HEAD,)
        return TrainedAdapters(self.config, self.base.weights, exact, [*self._layers], streamed, whole)
