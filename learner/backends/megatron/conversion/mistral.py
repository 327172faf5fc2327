from learner.backends.megatron.conversion.base import SHARED_LAYER, Family

MISTRAL = Family(layer_rules=SHARED_LAYER)
