from learner.conversion.base import SHARED_LAYER, Family

LLAMA = Family(layer_rules=SHARED_LAYER)
