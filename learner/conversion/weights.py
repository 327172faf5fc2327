"""Weights into a model and out of it, under their Hugging Face names."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from transformers import PretrainedConfig

from bus.errors import ConfigError
from learner.conversion.base import OUTPUT, Rule, Shape, State
from learner.conversion.families import FAMILIES, shape_of


def load_hf_weights(model: torch.nn.Module, hf_config: PretrainedConfig, state: State) -> None:
    """Copy `state` into `model`, converting to its dtype and device.

    Raises `ConfigError` with all names that are missing, unexpected or of another shape; the model is then
    unchanged.
    """
    shape = shape_of(hf_config)
    rules = list(FAMILIES[hf_config.model_type].rules(shape))
    parameters = dict(model.named_parameters())
    problems = list(_problems(parameters, rules, shape, state))
    if problems:
        raise ConfigError("these weights do not fit the model:\n" + "\n".join(f"- {p}" for p in problems))
    with torch.no_grad():
        for rule in rules:
            whole = rule.layout.merge([state[name] for name in rule.parts], shape)
            parameters[rule.megatron].copy_(whole)


def export_hf_weights(model: torch.nn.Module, hf_config: PretrainedConfig) -> dict[str, Tensor]:
    """Return copies of the model's weights, detached, on its device, exactly as they are.

    A tied output layer is left out, as Hugging Face does in files.
    """
    shape = shape_of(hf_config)
    parameters = dict(model.named_parameters())
    return {
        name: part.clone(memory_format=torch.contiguous_format)
        for rule in FAMILIES[hf_config.model_type].rules(shape)
        for name, part in zip(
            rule.parts, rule.layout.split(parameters[rule.megatron].detach(), shape), strict=True
        )
    }


def _problems(
    parameters: Mapping[str, Tensor], rules: list[Rule], shape: Shape, state: State
) -> Iterator[str]:
    expected = dict(_expected_shapes(parameters, rules, shape))
    yield from (f"missing {name} {list(expected[name])}" for name in expected.keys() - state.keys())
    yield from (f"unexpected {name}" for name in state.keys() - expected.keys() if not _ignored(name, shape))
    for name in expected.keys() & state.keys():
        if tuple(state[name].shape) != expected[name]:
            yield f"{name} is {list(state[name].shape)}, not {list(expected[name])}"


def _expected_shapes(
    parameters: Mapping[str, Tensor], rules: list[Rule], shape: Shape
) -> Iterator[tuple[str, tuple[int, ...]]]:
    for rule in rules:
        whole = tuple(parameters[rule.megatron].shape)
        yield from zip(rule.parts, rule.layout.part_shapes(whole, shape), strict=True)


def _ignored(name: str, shape: Shape) -> bool:
    """Tell names that say nothing new: a tied output layer, and a buffer of old Llama files."""
    return (shape.tied and name in OUTPUT.parts) or name.endswith("rotary_emb.inv_freq")
