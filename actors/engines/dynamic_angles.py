"""Rotary embeddings that SGLang scales otherwise than transformers and the learner."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bus.errors import ConfigError


def refuse_dynamic_angles(model: Path, described: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a model that SGLang would compute otherwise, by what its config.json says."""
    if "dynamic" in _rope_types(described):
        raise ConfigError(
            f"{model}: SGLang scales angles of the rope_type 'dynamic' in sequences of any length, and "
            "transformers and the learner in none that fits the context: set actors.engine.type=embedded, "
            "without servers of evaluation, or give the model another rope_type"
        )


def _rope_types(described: Mapping[str, Any]) -> set[str]:
    """Return the kinds of scaling that a config.json names, in the shape of older releases of transformers
    too."""
    text = described.get("text_config") or described
    given = text.get("rope_parameters") or text.get("rope_scaling") or {}
    of_layers = [each for each in given.values() if isinstance(each, dict)]
    return {str(each.get("rope_type") or each.get("type")) for each in of_layers or [given]}
