"""Says that tokens are drawn from another distribution than the one whose log-probs are recorded."""

from math import log as ln

import structlog

from actors.settings.actors import SamplingConfig

log = structlog.get_logger()


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
