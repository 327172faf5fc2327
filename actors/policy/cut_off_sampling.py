"""Has engines tell which tokens sampling kept, or says that tokens are drawn from another distribution than
the one whose log-probs are recorded."""

from math import log as ln

import structlog

from actors.config import SamplingConfig
from actors.engines.config import EngineConfig, SglangEngineConfig
from bus.errors import ConfigError

log = structlog.get_logger()
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


def warn_of_cut_off_sampling(sampling: SamplingConfig) -> None:
    """Warn where `top_p`, `top_k` or `min_p` cut tokens off, and say by how much recorded log-probs are too
    low, unless what was kept is recorded.

    They are those of all tokens, while a kept token is drawn with its probability over all kept ones.
    What `top_p` keeps has at least that probability; for `top_k` and `min_p` there is no such bound.
    """
    if sampling.keep_masks or not sampling.cuts_off:
        return
    bounded = sampling.top_k == 0 and sampling.min_p == 0
    log.warning(
        "sampling_is_off_policy",
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        nats_per_token=f"up to {-ln(sampling.top_p):.2f}" if bounded else "without a bound",
        meaning="recorded log-probs are those of all tokens, too low by so much, and importance ratios come "
        "out too high: set sampling.top_p=1, sampling.top_k=0 and sampling.min_p=0, or "
        "sampling.keep_masks=true",
    )
