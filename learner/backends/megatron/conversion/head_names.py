"""Names that a head for the token after the next (MTP) has in files."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class HeadNames:
    """Names of what a head consists of; `{}` stands for the number of the model's layers."""

    layer: str
    """Begins the names of its layer."""
    parts: Mapping[str, str]
    """Names of what it has beside its layer, by those in megatron-core."""
    embedding: str | None = None
    """Name of the copy of the model's embedding that some files have beside it; `None` where none has."""
    output: str | None = None
    """The same of the output layer."""


BEHIND = HeadNames(
    layer="model.layers.{}.",
    parts={
        "enorm.weight": "model.layers.{}.enorm.weight",
        "hnorm.weight": "model.layers.{}.hnorm.weight",
        "eh_proj.weight": "model.layers.{}.eh_proj.weight",
        "final_layernorm.weight": "model.layers.{}.shared_head.norm.weight",
    },
    embedding="model.layers.{}.embed_tokens.weight",
    output="model.layers.{}.shared_head.head.weight",
)
"""Names of a head that is one more layer, as of DeepSeek-V3 and GLM-4.5."""
APART = HeadNames(
    layer="mtp.layers.0.",
    parts={
        "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
        "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
        "eh_proj.weight": "mtp.fc.weight",
        "final_layernorm.weight": "mtp.norm.weight",
    },
)
"""Names of Qwen's, which are apart from the model's layers."""
