"""Estimates from n samples of a prompt how often k of them hold a right answer, or hold nothing else."""

from math import prod


def pass_at(samples: int, right: int, k: int) -> float:
    """Return the unbiased estimate of pass@k: that at least one of k samples is right.

    It is 1 - C(n - c, k) / C(n, k) with n `samples` of which c are `right`, as a product of numbers below 1,
    which neither overflows nor cancels (arXiv:2107.03374, equation 1 and figure 3)."""
    _refuse_impossible(samples, right, k)
    if samples - right < k:
        return 1.0
    return 1.0 - prod(1.0 - k / i for i in range(samples - right + 1, samples + 1))


def pass_all(samples: int, right: int, k: int) -> float:
    """Return the unbiased estimate of pass^k: that all of k samples are right.

    It is C(c, k) / C(n, k) (arXiv:2406.12045, section 3)."""
    _refuse_impossible(samples, right, k)
    return prod((right - i) / (samples - i) for i in range(k)) if right >= k else 0.0


def _refuse_impossible(samples: int, right: int, k: int) -> None:
    if not (0 <= right <= samples and 1 <= k <= samples):
        raise ValueError(
            f"{right} right of {samples} samples say nothing of {k}: k is between 1 and the samples"
        )
