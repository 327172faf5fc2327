"""Sampling that cuts tokens off: which engines tell what it kept (`sampling.keep_masks`), and a warning where
nobody does. Loads nothing but settings."""

from math import log as ln

from actors.settings.actors import SamplingConfig
from actors.settings.engines import MASK_TOKENS, EngineConfig, tells_kept
from bus.config import MOST_KEPT
from bus.errors import ConfigError

LARGEST_TOLD = 4096
"""SGLang ends a request whose set is larger; equal logits at the edge of `MOST_KEPT` are all kept."""


def warn_of_cut_off_sampling(sampling: SamplingConfig) -> None:
    """Warn where `top_p`, `top_k` or `min_p` cut tokens off, and say by how much recorded log-probs are too
    low, unless what was kept is recorded.

    They are those of all tokens, while a kept token is drawn with its probability over all kept ones.
    What `top_p` keeps has at least that probability; for `top_k` and `min_p` there is no such bound.
    """
    if sampling.keep_masks or not sampling.cuts_off:
        return
    import structlog  # help loads this module, and logs nothing

    log = structlog.get_logger()
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


def refuse_untold_masks(sampling: SamplingConfig, engine: EngineConfig) -> None:
    """Raise `ConfigError` where kept tokens are to be recorded, and the engine does not tell them."""
    if not sampling.keep_masks or engine.in_process:
        return
    servers = engine.servers
    if servers.disaggregation.enabled:
        raise ConfigError(
            "sampling.keep_masks=true with actors.engine.disaggregation: a pair was not tried with it: leave "
            "out one of them; without keep_masks see the warning sampling_is_off_policy"
        )
    if int(str(most := servers.settings.get(MASK_TOKENS, LARGEST_TOLD))) < MOST_KEPT:
        raise ConfigError(
            f"sampling.keep_masks=true with actors.engine.server.{MASK_TOKENS}={most}: SGLang ends requests "
            f"of which it keeps more tokens, and {MOST_KEPT} may be kept: leave it out"
        )
    drafts = str(servers.settings.get("speculative_algorithm") or "")
    if not tells_kept(drafts):
        raise ConfigError(
            f"sampling.keep_masks=true with actors.engine.server.speculative_algorithm={drafts!r}: SGLang "
            "does not tell then what it kept: leave out one of them"
        )


def told_by(engine: EngineConfig, sampling: SamplingConfig) -> EngineConfig:
    """Return the settings of engines that can tell what `sampling` keeps: with them a server whose SGLang
    cannot does not start, and one that runs already is refused. Raises as `refuse_untold_masks` does."""
    refuse_untold_masks(sampling, engine)
    if not sampling.keep_masks or engine.in_process:
        return engine
    return engine.model_copy(update={"server": {MASK_TOKENS: LARGEST_TOLD, **engine.servers.server}})
