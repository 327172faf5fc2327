from learner.backends.megatron.conversion.base import SHARED_LAYER, Family

LLAMA = Family(layer_rules=SHARED_LAYER)
