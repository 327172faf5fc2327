"""Families without experts whose layers differ in biases and norms alone."""

from learner.backends.megatron.conversion.base import QK_NORM, QKV_BIAS, SHARED_LAYER, Family

LLAMA = Family(layer_rules=SHARED_LAYER)
MISTRAL = Family(layer_rules=SHARED_LAYER)
QWEN2 = Family(layer_rules=(*SHARED_LAYER, QKV_BIAS), qkv_bias=True)
QWEN3 = Family(layer_rules=(*SHARED_LAYER, *QK_NORM), qk_norm=True)
