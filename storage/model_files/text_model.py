"""The text model inside a multimodal one: its configuration, and the names of its weights.

Files name the language model in three ways: `language_model.model.layers` (Gemma 3, Mistral 3, Kimi K2.5),
`model.language_model.layers` (Qwen3.5, Gemma 4) and `language_model.layers`. Alone its weights have the names
of a text model, `model.layers` and `lm_head`."""

import copy
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from storage.model_files.families import family_named

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LANGUAGE = re.compile(r"(?:model\.language_model\.|language_model\.(?:model\.)?)(?!lm_head\.)")
_HEADS = re.compile(r"(?:language_model\.)?(lm_head\..*|mtp\..*)")
"""Names of the output layer, and of Qwen's heads for several next tokens, which lie beside the layers."""
OWN_NAMES = {_LANGUAGE.pattern: "model.", r"language_model\.lm_head\.": "lm_head."}
"""The same as patterns and what they become, as transformers takes them."""


def text_alone(config: "PretrainedConfig") -> "PretrainedConfig":
    """Return the configuration of the text model that transformers builds without the other parts.

    `config` itself is returned for one of text alone, for a vision-language model that is trained as a whole,
    and where there is no such model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # slow to import

    text = config.get_text_config()
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(text.model_type)
    if (
        text is config
        or config.is_encoder_decoder
        or family_named(config.model_type).sees_images
        or architecture is None
    ):
        return config
    text = copy.deepcopy(text)
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", text.tie_word_embeddings)
    text.architectures = [architecture]
    text.dtype = text.dtype or config.dtype
    if quantised := getattr(config, "quantization_config", None):
        text.quantization_config = quantised
    return text


def own_name(name: str) -> str | None:
    """Return the name in a text model alone of a tensor of multimodal files; None for one of another part."""
    if head := _HEADS.fullmatch(name):
        return head[1]
    found = _LANGUAGE.match(name)
    return None if found is None else f"model.{name[found.end() :]}"


def is_multimodal(names: Iterable[str]) -> bool:
    """Tell whether these are names in files of a multimodal model."""
    return any(map(_LANGUAGE.match, names))
