"""How fast a series grows: the slope of its lower envelope, by Theil and Sen, with a confidence interval."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WARM_UP_SHARE = 0.4
"""Part of a life, at its beginning, that is left out: caches fill, and streams reach their bounds."""
WINDOWS = 24
"""Windows of equal length into which the rest is divided. Each counts by its smallest value: what is used for
a moment, such as a batch or an allocator's slack, is no growth, and a leak raises the smallest value too."""
LEAST_WINDOWS = 8
"""Windows with a sample that a fit needs at least."""
CONFIDENCE = 0.99
"""Confidence of the interval. Some eighty series are fitted: of as many at 95 % four would seem to grow."""


@dataclass(frozen=True)
class Growth:
    """The growth of one series."""

    steps: float
    """Optimizer steps from the first window to the last."""
    windows: int
    first: float
    """Value of the first window."""
    last: float
    per_step: float
    """Slope: the median over all pairs of windows."""
    low: float
    """Lower end of the slope's interval."""
    high: float


def fit_growth(steps: Sequence[float], values: Sequence[float]) -> Growth | None:
    """Fit the growth of a series per step; None when there are too few samples to tell.

    Args:
        steps: optimizer steps done at each sample, not falling.
        values: the samples.

    The slope is the median of the slopes between all pairs of windows (Sen 1968, doi:10.2307/2285891), so up
    to 29 % of the windows may be anything.
    """
    from scipy.stats import theilslopes  # takes a quarter of a second to import, and only this needs it

    at, floors = _lower_envelope(np.asarray(steps, np.float64), np.asarray(values, np.float64))
    if len(at) < LEAST_WINDOWS:
        return None
    found = theilslopes(floors, at, alpha=CONFIDENCE)
    return Growth(
        steps=float(at[-1] - at[0]),
        windows=len(at),
        first=float(floors[0]),
        last=float(floors[-1]),
        per_step=float(found.slope),
        low=float(found.low_slope),
        high=float(found.high_slope),
    )


def _lower_envelope(
    steps: NDArray[np.float64], values: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the middle and the smallest value of each window that has samples, after the warm-up."""
    if not len(steps) or steps[-1] <= steps[0]:
        return np.empty(0), np.empty(0)
    edges = np.linspace(steps[0] + WARM_UP_SHARE * (steps[-1] - steps[0]), steps[-1], WINDOWS + 1)
    number = np.searchsorted(edges, steps, side="right") - 1  # -1: the warm-up
    number[steps == edges[-1]] = WINDOWS - 1
    filled = [n for n in range(WINDOWS) if (number == n).any()]
    middles = (edges[:-1] + edges[1:]) / 2
    return middles[filled], np.array([values[number == n].min() for n in filled])
