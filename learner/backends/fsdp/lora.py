"""Adapters on the linear layers of a model of transformers."""

from collections.abc import Container, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from pydantic import JsonValue
from torch import Tensor
from transformers import PreTrainedModel

from bus.errors import ConfigError
from learner.backends.base import Adapters, Exported
from learner.backends.fsdp.names import FileNames
from learner.backends.fsdp.weights import local, whole
from learner.backends.lora import (
    BaseNorms,
    base_digest,
    excess,
    first_a,
    merged,
    saved_settings,
    squared_norms,
    targeted,
)
from learner.config.lora import LoraConfig
from learner.model_directories.lazy_weights import State
from storage.weights.adapter_names import PREFIX, WEIGHT, adapter_names, magnitude_name

CHANGE = "lora_magnitude_change"
"""Ends the name of the parameter by which the lengths of a weight's rows change."""


def add_adapters(
    hf_model: PreTrainedModel, names: FileNames, config: LoraConfig, dtype: torch.dtype
) -> list[str]:
    """Freeze all weights of a model, and give its linear layers float32 adapters; return these layers' names.

    Nobody updates the frozen weights, so they lie in memory as `dtype`, in which the model computes. They
    mean nothing yet. Raises `ConfigError` for targets that are not there, and for a layer that files know by
    another name.
    """
    hf_model.requires_grad_(False)
    for parameter in hf_model.parameters():
        parameter.data = torch.empty_like(parameter, dtype=dtype)
    layers = dict(_linear_layers(hf_model))
    chosen = targeted(config, list(layers))
    for name in chosen:
        if list(names.tensors[name + WEIGHT].files) != [name + WEIGHT]:
            raise ConfigError(
                f"learner.lora.targets: model files know {name} by another name, by which nobody would find "
                "its adapter; name other layers"
            )
        _add_adapter(layers[name], name, config)
    return chosen


def _linear_layers(hf_model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Linear]]:
    """Yield the linear layers of the transformer blocks; the output layer is fused with the loss."""
    kinds = hf_model._no_split_modules or ()
    for block, module in hf_model.named_modules():
        if type(module).__name__ in kinds:
            for name, layer in module.named_modules():
                if isinstance(layer, torch.nn.Linear):
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


class Adapter(NamedTuple):
    """What a weight has, sharded like all parameters."""

    a: Tensor
    b: Tensor
    change: Tensor | None
    """How the lengths of the weight's rows differ from those of the frozen ones; None where that is not
    trained."""


class ModelAdapters:
    """The adapters of a sharded model."""

    def __init__(
        self, config: LoraConfig, modules: Sequence[str], base: State, tensors: dict[str, Tensor],
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """Take them away from the `tensors` of the model, of which the weights of `base` are left. It
        computes in `dtype`."""
        self.config = config
        self._modules = modules
        self._base = base
        self._norms = BaseNorms(base, dtype)
        self._adapters: dict[str, Adapter] = {}
        self.tensors: dict[str, Tensor] = {}
        """What is trained of all layers, A and B by peft's names."""
        for module in modules:
            a, b = (tensors.pop(f"{module}.lora_{letter}{WEIGHT}") for letter in "AB")
            change = tensors.pop(f"{module}.{CHANGE}", None)
            self._adapters[module + WEIGHT] = Adapter(a, b, change)
            self.tensors |= zip(adapter_names(module + WEIGHT), (a, b), strict=True)
            if change is not None:
                self.tensors[f"{PREFIX}{module}.{CHANGE}"] = change

    def __contains__(self, weight: object) -> bool:
        """Tell whether a weight of the model has an adapter."""
        return weight in self._adapters

    @torch.no_grad()
    def switch_off(self) -> None:
        """Let the policy be the model without them."""
        for adapter in self._adapters.values():
            local(adapter.b).zero_()
            if adapter.change is not None:
                local(adapter.change).zero_()

    def merge(self, weight: str, whole_weight: Tensor) -> Tensor:
        """Return what a weight and its adapter make together, on rank 0. Every rank calls this."""
        adapter = self._adapters.get(weight)
        if adapter is None:
            return whole_weight
        dtype = whole_weight.dtype
        a, b = whole(adapter.a, dtype), whole(adapter.b, dtype)
        change = None if adapter.change is None else whole(adapter.change, dtype)
        if dist.get_rank() != 0:
            return whole_weight
        magnitude = None if change is None else self._norms.magnitude(weight, change)
        return merged(whole_weight, a, b, self.config.scale, magnitude)

    def exported(self, dtype: torch.dtype) -> Exported:
        """Return the adapters to publish alone, as the `dtype` in which they are computed with; the lengths
        of rows are float32."""
        here: dict[str, Tensor] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        exact: dict[str, torch.dtype] = {}
        views = dist.get_world_size() == 1 and dtype == torch.float32
        for weight, (a, b, change) in self._adapters.items():
            for name, tensor in zip(adapter_names(weight), (a, b), strict=True):
                shapes[name], exact[name] = tuple(tensor.shape), dtype
                here |= {name: local(tensor)} if views else {}
            if change is not None:
                name = magnitude_name(weight)
                shapes[name], exact[name] = tuple(change.shape), torch.float32
        return Exported(shapes, here, partial(self._streamed, dtype, without=here), exact)

    def _streamed(self, dtype: torch.dtype, *, without: Container[str] = ()) -> Iterator[tuple[str, Tensor]]:
        for weight, (a, b, change) in self._adapters.items():
            for name, tensor in zip(adapter_names(weight), (a, b), strict=True):
                if name in without:
                    continue
                found = whole(tensor, dtype)
                if dist.get_rank() == 0:
                    yield name, found
            if change is not None:
                found = whole(change, dtype)
                if dist.get_rank() == 0:
                    yield magnitude_name(weight), self._norms.magnitude(weight, found)

    def described(self, exact: Mapping[str, torch.dtype]) -> Adapters:
        """Return what others than this backend need of them; `exact` weights have dtypes of their own."""
        streamed = partial(self._streamed, torch.float32)
        return Adapters(self.config, self._base, exact, self._modules, streamed)

    def saved(self) -> dict[str, JsonValue]:
        """Return what must be the same where a checkpoint of them is loaded."""
        return {**saved_settings(self.config), "base": self._base_digest}

    @cached_property
    def _base_digest(self) -> str:
        return base_digest(self._base)
