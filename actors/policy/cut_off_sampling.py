"""Says that tokens are drawn from another distribution than the one whose log-probs are recorded."""

from math import log as ln

import structlog

from actors.config import SamplingConfig

log = structlog.get_logger()


def warn_of_cut_off_sampling(sampling: SamplingConfig) -> None:
    """Warn where `top_p` or `top_k` cut tokens off, and say by how much recorded log-probs are too low.

    They are those of all tokens, while a kept token is drawn with its probability over all kept ones.
    What `top_p` keeps has at least that probability; for `top_k` there is no such bound.
    """
    if sampling.top_p == 1 and sampling.top_k == 0:
        return
    log.warning(
        "sampling_is_off_policy",
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        nats_per_token=f"up to {-ln(sampling.top_p):.2f}" if sampling.top_k == 0 else "without a bound",
        meaning="recorded log-probs are those of all tokens, too low by so much, and importance ratios come "
        "out too high: set sampling.top_p=1 and sampling.top_k=0",
    )
