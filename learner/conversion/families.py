from transformers import PretrainedConfig

from learner.conversion.base import Family, Shape
from learner.conversion.llama import LLAMA
from learner.conversion.mixtral import MIXTRAL
from learner.conversion.qwen2 import QWEN2
from learner.conversion.qwen3 import QWEN3
from learner.conversion.qwen3_moe import QWEN3_MOE

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mixtral": MIXTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
}
"""By `model_type` of the transformers configuration."""


def shape_of(hf_config: PretrainedConfig) -> Shape:
    """Read a model's shape, its experts included."""
    return FAMILIES[hf_config.model_type].shape(hf_config)
