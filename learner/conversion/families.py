from learner.conversion.base import Family
from learner.conversion.llama import LLAMA
from learner.conversion.qwen2 import QWEN2
from learner.conversion.qwen3 import QWEN3

FAMILIES: dict[str, Family] = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}
"""By `model_type` of the transformers configuration."""
