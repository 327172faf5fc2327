"""Confidence intervals of means over prompts, which are a sample of all prompts of their kind."""

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, variance
from typing import NamedTuple

Z_95 = 1.959963984540054
"""Quantile of the normal distribution that leaves 2.5 % above it."""


class Estimate(NamedTuple):
    """A mean with the interval that contains the true one with a probability of about 95 %."""

    mean: float
    low: float
    high: float


def share(of_prompts: Sequence[float], answers: int) -> Estimate:
    """Return the mean of shares, one of each prompt, each between 0 and 1, and Wilson's interval of it.

    Wilson's interval (doi:10.1080/01621459.1927.10502953) is that of n independent answers which are right or
    wrong. Here n is the number of such answers whose mean varies as the mean over these prompts does: answers
    to one prompt are alike, and count less (the design effect of clusters, as in arXiv:2411.00640, section
    2.2). It is the number of prompts where they do not differ, and all are right or all wrong.

    Args:
        of_prompts: one share for each prompt, at least one.
        answers: number of all answers, which `n` does not exceed."""
    count, mean = len(of_prompts), fmean(of_prompts)
    spread = variance(of_prompts) if count > 1 else 0.0
    n = float(count)
    if spread > 0:
        n = min(float(answers), count * mean * (1 - mean) / spread)
    elif 0 < mean < 1:
        n = float(answers)
    centre = (mean + Z_95**2 / (2 * n)) / (1 + Z_95**2 / n)
    half = Z_95 / (1 + Z_95**2 / n) * sqrt(mean * (1 - mean) / n + Z_95**2 / (4 * n**2))
    return Estimate(mean, max(0.0, centre - half), min(1.0, centre + half))


def mean(of_prompts: Sequence[float], answers: int) -> Estimate:
    """Return the mean of any numbers, one of each prompt, with its interval: as `share` where all lie between
    0 and 1, else the normal one by their standard error (arXiv:2411.00640, section 2.1), which has no width
    where there is one prompt."""
    if all(0 <= one <= 1 for one in of_prompts):
        return share(of_prompts, answers)
    found = fmean(of_prompts)
    half = Z_95 * sqrt(variance(of_prompts) / len(of_prompts)) if len(of_prompts) > 1 else 0.0
    return Estimate(found, found - half, found + half)
