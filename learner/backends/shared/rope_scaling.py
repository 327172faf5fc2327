"""How rotary embeddings are scaled, and up to which length the kind `dynamic` is not.

Beyond `max_position_embeddings` its angles would be those of the longest sequence, which is another one in
each pack, and another one for an engine at each token."""

from collections.abc import Iterable

from transformers import PretrainedConfig

from bus.errors import ConfigError
from learner.data.packing import MicroBatch

DYNAMIC = "dynamic"


def rope_types(hf_config: PretrainedConfig) -> set[str]:
    """Return the kinds of rotary embeddings; a model may have one for each kind of layer."""
    found = getattr(hf_config, "rope_parameters", None) or {}
    several = [each for each in found.values() if isinstance(each, dict)]
    return {str(each.get("rope_type", "default")) for each in several or [found]}


def unscaled_tokens(hf_config: PretrainedConfig) -> int | None:
    """Return up to which length sequences have the same angles; None where all have."""
    text = hf_config.get_text_config()
    return int(text.max_position_embeddings) if DYNAMIC in rope_types(text) else None


def refuse_scaled(batches: Iterable[MicroBatch], most: int | None) -> None:
    """Raise `ConfigError` for a sequence of more than `most` tokens, as `unscaled_tokens` returns them."""
    longest = max((length for batch in batches for length in batch.lengths), default=0)
    if most is not None and longest > most:
        raise ConfigError(
            f"a sequence of {longest} tokens is longer than max_position_embeddings={most}, and rope_type="
            f"'{DYNAMIC}' would turn all others of its pack by its angles: have engines end "
            "sequences earlier, or scale by yarn"
        )
