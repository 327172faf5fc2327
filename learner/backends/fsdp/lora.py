"""Adapters on the linear layers of a model of transformers."""

from collections.abc import Iterator, Mapping, Sequence
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
from learner.backends.lora import base_digest, first_a, merged, saved_settings, targeted
from learner.config.lora import LoraConfig
from learner.model_directories.lazy_weights import State
from storage.weights.adapter_names import WEIGHT, adapter_names


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


class Pair(NamedTuple):
    """A and B of a weight, sharded like all parameters."""

    a: Tensor
    b: Tensor


class ModelAdapters:
    """The adapters of a sharded model."""

    def __init__(
        self, config: LoraConfig, modules: Sequence[str], base: State, tensors: dict[str, Tensor]
    ) -> None:
        """Take them away from the `tensors` of the model, of which the weights of `base` are left."""
        self.config = config
        self._modules = modules
        self._base = base
        self._pairs = {
            module + WEIGHT: Pair(
                tensors.pop(f"{module}.lora_A{WEIGHT}"), tensors.pop(f"{module}.lora_B{WEIGHT}")
            )
            for module in modules
        }
        self.tensors: dict[str, Tensor] = {}
        """A and B of all layers by peft's names."""
        for weight, pair in self._pairs.items():
            self.tensors |= zip(adapter_names(weight), pair, strict=True)

    def __contains__(self, weight: object) -> bool:
        """Tell whether a weight of the model has an adapter."""
        return weight in self._pairs

    @torch.no_grad()
    def switch_off(self) -> None:
        """Let the policy be the model without them."""
        for pair in self._pairs.values():
            local(pair.b).zero_()

    def merge(self, weight: str, whole_weight: Tensor) -> Tensor:
        """Return what a weight and its adapter make together. Every rank calls this."""
        pair = self._pairs.get(weight)
        if pair is None:
            return whole_weight
        a, b = (whole(tensor, whole_weight.dtype) for tensor in pair)
        return merged(whole_weight, a, b, self.config.scale)

    def exported(self, dtype: torch.dtype) -> Exported:
        """Return the adapters to publish alone, as the `dtype` in which they are computed with."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        here: dict[str, Tensor] = {}
        if dist.get_world_size() == 1 and dtype == torch.float32:
            here = {name: local(tensor) for name, tensor in self.tensors.items()}
        rest = partial(iter, ()) if here else partial(self._streamed, dtype)
        return Exported(shapes, here, rest, dict.fromkeys(shapes, dtype))

    def _streamed(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.tensors.items():
            found = whole(tensor, dtype)
            if dist.get_rank() == 0:
                yield name, found

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
