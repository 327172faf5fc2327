from learner.backends.megatron.conversion.base import QK_NORM, SHARED_LAYER, Family

QWEN3 = Family(layer_rules=(*SHARED_LAYER, *QK_NORM), qk_norm=True)
