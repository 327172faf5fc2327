"""Tells which experts a mixture-of-experts model has, and reads to which of them SGLang sent its tokens."""

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from bus.errors import ConfigError, EngineError

LARGEST = 1 << 15
"""Experts that the learner's int16 tells apart; one byte of a trajectory tells `IN_A_BYTE` apart."""
IN_A_BYTE = 256
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Words for how many there are: Qwen's, Mixtral's, DeepSeek's."""


@dataclass(frozen=True, slots=True)
class Routing:
    """The shape of a model's routing."""

    layers: int
    """All of the model's; what a dense one says means nothing."""
    per_token: int
    """Experts that a token goes to in a layer."""
    experts: int

    @classmethod
    def of_model(cls, directory: Path) -> Self:
        """Read a directory's config.json. Raises as `of_config` does."""
        return cls.of_config(json.loads((directory / "config.json").read_text()))

    @classmethod
    def of_config(cls, whole: Mapping[str, Any]) -> Self:
        """Read a model's configuration. Raises `ConfigError` for no experts and for too many."""
        config = whole.get("text_config") or whole
        experts = next((config[name] for name in _COUNTS if config.get(name)), 0)
        if not experts or not config.get("num_experts_per_tok"):
            raise ConfigError(
                f"actors.engine.routed_experts: the model, a {config.get('model_type', 'dense one')}, has no "
                "experts: leave the setting out"
            )
        if experts > LARGEST:
            raise ConfigError(
                f"actors.engine.routed_experts: the model has {experts} experts a layer, trajectories tell "
                f"{LARGEST} apart: leave the setting out"
            )
        return cls(int(config["num_hidden_layers"]), int(config["num_experts_per_tok"]), int(experts))

    @property
    def dtype(self) -> type[np.unsignedinteger[Any]]:
        return np.uint8 if self.experts <= IN_A_BYTE else np.uint16

    def read(self, text: str, rows: int) -> np.ndarray:
        """Return the last rows of what a server reports, base64 of int32, as [rows, layers, per_token] of
        uint8, or of uint16 where a layer has more than 256 experts. Raises `EngineError` for fewer rows,
        another shape, and experts that the model does not have."""
        try:
            found = np.frombuffer(base64.b64decode(text, validate=True), "<i4")
            found = found.reshape(-1, self.layers, self.per_token)
        except (binascii.Error, ValueError) as error:
            raise EngineError(
                f"the routed experts are not {self.per_token} in each of {self.layers} layers: {error}"
            ) from error
        if len(found) < rows:
            raise EngineError(f"the experts of {len(found)} tokens came where those of {rows} were asked for")
        found = found[len(found) - rows :]
        if found.size and not (found.min() >= 0 and found.max() < self.experts):
            raise EngineError(
                f"a token went to expert {found.max() if found.max() >= self.experts else found.min()} of a "
                f"model that has {self.experts}"
            )
        return found.astype(self.dtype)
