from learner.backends.megatron.conversion.base import QKV_BIAS, SHARED_LAYER, Family

QWEN2 = Family(layer_rules=(*SHARED_LAYER, QKV_BIAS), qkv_bias=True)
