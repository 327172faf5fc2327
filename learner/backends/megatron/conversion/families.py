from collections.abc import Callable, Iterable
from pkgutil import resolve_name

import torch
from transformers import PretrainedConfig, __version__

from bus.errors import ConfigError
from learner.backends.megatron.conversion.base import (
    CHOICE_BIAS,
    QK_NORM,
    QKV_BIAS,
    SHARED_LAYER,
    Family,
    Rule,
    Shape,
)
from storage.model_files.families import families_with, family_named, refuse_older_transformers

LLAMA = Family(layer_rules=SHARED_LAYER)
MISTRAL = Family(layer_rules=SHARED_LAYER)
QWEN2 = Family(layer_rules=(*SHARED_LAYER, QKV_BIAS), qkv_bias=True)
QWEN3 = Family(layer_rules=(*SHARED_LAYER, *QK_NORM), qk_norm=True)


def family_of(hf_config: PretrainedConfig) -> Family:
    """Find a model's family. Raises `ConfigError` with those known for one that is not among them."""
    if problem := unknown(hf_config):
        raise ConfigError(problem)
    refuse_older_transformers(hf_config.model_type, __version__)
    found: Family | Callable[[PretrainedConfig], Family]
    found = resolve_name(family_named(hf_config.model_type).megatron)
    return found if isinstance(found, Family) else found(hf_config)


def unknown(hf_config: PretrainedConfig) -> str:
    """Return that a model is of no family that is trained on Megatron; empty for one of these."""
    if family_named(hf_config.model_type).megatron:
        return ""
    known = ", ".join(families_with(lambda family: family.megatron))
    return f"model_type={hf_config.model_type!r} is unknown; known are {known}"


def shape_of(hf_config: PretrainedConfig) -> Shape:
    return family_of(hf_config).shape(hf_config)


def float32_weights(rules: Iterable[Rule]) -> dict[str, torch.dtype]:
    """Return the Hugging Face names of the weights that are float32 whatever the model's dtype is."""
    return {
        part: torch.float32 for rule in rules if rule.megatron.endswith(CHOICE_BIAS) for part in rule.parts
    }
