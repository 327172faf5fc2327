from typing import Literal

from torch import Tensor

from learner.algorithms.corrections.bounds import Bound, bounded
from learner.algorithms.tokens import LARGEST_LOG_RATIO
from learner.algorithms.whole_sequences import by_sequence


def sequence_tis(
    log_ratio: Tensor,
    sequence: Tensor,
    *,
    sequence_cap: float,
    over: Literal["product", "mean"],
    bound: Bound = "truncate",
    floor: float | None = None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Bounded importance weight of each sequence, which all its tokens share.

    The product of the tokens' ratios is the sequence's exact ratio; their geometric mean varies less and is
    biased (arXiv:2507.18071, eq. 7).

    Args:
        log_ratio: [N] nats, the policy that the loss takes its tokens to come from over the one that sampled.
        sequence: int64 [N], which sequence a token belongs to; all tokens of a sequence are here.

    Returns weights [N], which tokens are kept [N], and which had a ratio out of bounds [N].
    """
    ratio = by_sequence(log_ratio, sequence, over).clamp(max=LARGEST_LOG_RATIO).exp()
    return bounded(ratio, cap=sequence_cap, bound=bound, floor=floor)
