from collections.abc import Callable, Iterable

import torch
from transformers import PretrainedConfig

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
from learner.backends.megatron.conversion.deepseek_v3 import deepseek_v3
from learner.backends.megatron.conversion.gemma3 import gemma3
from learner.backends.megatron.conversion.glm4 import glm4
from learner.backends.megatron.conversion.glm4_moe import glm4_moe
from learner.backends.megatron.conversion.gpt_oss import gpt_oss
from learner.backends.megatron.conversion.minimax_m2 import minimax_m2
from learner.backends.megatron.conversion.mixtral import MIXTRAL
from learner.backends.megatron.conversion.qwen2_moe import QWEN2_MOE
from learner.backends.megatron.conversion.qwen3_moe import QWEN3_MOE
from learner.backends.megatron.conversion.qwen3_next import qwen3_5, qwen3_5_moe, qwen3_next

LLAMA = Family(layer_rules=SHARED_LAYER)
MISTRAL = Family(layer_rules=SHARED_LAYER)
QWEN2 = Family(layer_rules=(*SHARED_LAYER, QKV_BIAS), qkv_bias=True)
QWEN3 = Family(layer_rules=(*SHARED_LAYER, *QK_NORM), qk_norm=True)


FAMILIES: dict[str, Family | Callable[[PretrainedConfig], Family]] = {
    "deepseek_v3": deepseek_v3,
    "gemma3_text": gemma3,
    "glm4": glm4,
    "glm4_moe": glm4_moe,
    "glm4_moe_lite": deepseek_v3,
    "gpt_oss": gpt_oss,
    "llama": LLAMA,
    "minimax_m2": minimax_m2,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "qwen2": QWEN2,
    "qwen2_moe": QWEN2_MOE,
    "qwen3": QWEN3,
    "qwen3_5_moe_text": qwen3_5_moe,
    "qwen3_5_text": qwen3_5,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_next": qwen3_next,
}
"""Families by `model_type` of the transformers configuration; some depend on more of it."""


def family_of(hf_config: PretrainedConfig) -> Family:
    """Find a model's family. Raises `ConfigError` with those known for one that is not among them."""
    if hf_config.model_type not in FAMILIES:
        raise ConfigError(
            f"model_type={hf_config.model_type!r} is unknown; known are {', '.join(sorted(FAMILIES))}"
        )
    found = FAMILIES[hf_config.model_type]
    return found if isinstance(found, Family) else found(hf_config)


def shape_of(hf_config: PretrainedConfig) -> Shape:
    """Read a model's shape, its experts included."""
    return family_of(hf_config).shape(hf_config)


def float32_weights(rules: Iterable[Rule]) -> dict[str, torch.dtype]:
    """Return the Hugging Face names of the weights that are float32 whatever the model's dtype is."""
    return {
        part: torch.float32 for rule in rules if rule.megatron.endswith(CHOICE_BIAS) for part in rule.parts
    }
