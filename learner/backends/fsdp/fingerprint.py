"""The hyperparameters of a model that decide which weights fit it."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue
from transformers import PretrainedConfig

GENERIC = PretrainedConfig().to_dict().keys() - {"tie_word_embeddings", "model_type"}
"""Hyperparameters that every configuration has, about files, labels and printing."""
OTHERS = {"use_cache", "initializer_range", "max_position_embeddings"}
"""Hyperparameters that change neither a shape nor what a forward pass computes."""
OTHER_ENDINGS = ("_token_id", "dropout", "pdrop", "loss_coef")
"""Endings of such: this backend trains without dropout and without losses of routers."""


def fingerprint(hf_config: PretrainedConfig) -> dict[str, JsonValue]:
    """Return all hyperparameters of the family, as they read back from JSON."""
    read_back: dict[str, JsonValue] = json.loads(json.dumps(_own(hf_config.to_dict()), default=str))
    return read_back


def _own(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _own(value) if name.endswith("_config") and isinstance(value, dict) else value
        for name, value in values.items()
        if name not in GENERIC | OTHERS and not name.endswith(OTHER_ENDINGS)
    }
