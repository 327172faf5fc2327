"""The hyperparameters of a model that decide which weights fit it."""

import json

from pydantic import JsonValue
from transformers import PretrainedConfig

GENERIC = PretrainedConfig().to_dict().keys() - {"tie_word_embeddings", "model_type"}
"""Hyperparameters that every configuration has, about files, labels and printing."""
OTHERS = {"use_cache", "initializer_range", "max_position_embeddings"}
"""Further ones that change neither a shape nor what a forward pass computes."""
OTHER_ENDINGS = ("_token_id", "dropout", "pdrop", "loss_coef")
"""Endings of such: this backend trains without dropout and without losses of routers."""


def fingerprint(hf_config: PretrainedConfig) -> dict[str, JsonValue]:
    """Return all hyperparameters of the family, as they read back from JSON."""
    own = {
        name: value
        for name, value in hf_config.to_dict().items()
        if name not in GENERIC | OTHERS and not name.endswith(OTHER_ENDINGS)
    }
    read_back: dict[str, JsonValue] = json.loads(json.dumps(own, default=str))
    return read_back
