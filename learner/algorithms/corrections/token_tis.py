from torch import Tensor

from learner.algorithms.corrections.bounds import Bound, bounded
from learner.algorithms.tokens import LARGEST_LOG_RATIO


def token_tis(
    log_ratio: Tensor,
    sequence: Tensor,
    *,
    truncation_cap: float,
    bound: Bound = "truncate",
    floor: float | None = None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Bounded importance weight of each token (IMPALA's rho, arXiv:1802.01561).

    Args:
        log_ratio: [N] nats, the policy that the loss takes its tokens to come from over the one that sampled.
        sequence: int64 [N], which sequence a token belongs to; this correction does not ask.

    Returns weights [N], which tokens are kept [N], and which had a ratio out of bounds [N].
    """
    ratio = log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()
    return bounded(ratio, cap=truncation_cap, bound=bound, floor=floor)
