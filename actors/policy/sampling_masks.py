"""Servers that tell which tokens sampling kept (`sampling.keep_masks`). Loads nothing but settings."""

from actors.config import SamplingConfig
from actors.engines.config import EngineConfig, SglangEngineConfig
from bus.errors import ConfigError

MASK_TOKENS = "sampling_mask_max_tokens"
"""SGLang's setting of the largest set that it tells, which it has where it tells any."""
LARGEST_TOLD = 4096
"""SGLang ends a request whose set is larger; equal logits at the edge of `MOST_KEPT` are all kept."""


def refuse_untold_masks(sampling: SamplingConfig, engine: EngineConfig) -> None:
    """Raise `ConfigError` where kept tokens are to be recorded, and the engine does not tell them."""
    if not sampling.keep_masks or not isinstance(engine, SglangEngineConfig):
        return
    if engine.disaggregation.enabled:
        raise ConfigError(
            "sampling.keep_masks=true with actors.engine.disaggregation: a pair was not tried with it: leave "
            "out one of them; without keep_masks see the warning sampling_is_off_policy"
        )
    drafts = str(engine.settings.get("speculative_algorithm") or "")
    if drafts and not drafts.upper().startswith("DFLASH"):
        raise ConfigError(
            f"sampling.keep_masks=true with actors.engine.server.speculative_algorithm={drafts!r}: SGLang "
            "does not tell then what it kept: leave out one of them"
        )


def told_by(engine: EngineConfig, sampling: SamplingConfig) -> EngineConfig:
    """Return the settings of engines that can tell what `sampling` keeps: a server of our own whose SGLang
    cannot does not start then, for a setting that it does not know. Raises as `refuse_untold_masks` does."""
    refuse_untold_masks(sampling, engine)
    if not sampling.keep_masks or not isinstance(engine, SglangEngineConfig) or engine.attached:
        return engine
    return engine.model_copy(update={"server": {MASK_TOKENS: LARGEST_TOLD, **engine.server}})
