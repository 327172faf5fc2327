"""Curves of held-out accuracy: smoothed, and where they reach a target."""

from collections.abc import Sequence
from math import nan

import numpy as np

NEIGHBOURS = 1
"""Evaluations on either side that smooth one: the sampling error of 256 answers is 0.02 at 0.9."""


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and its neighbours, as far as there are any."""
    array = np.array(values)
    spans = (slice(max(0, n - NEIGHBOURS), n + NEIGHBOURS + 1) for n in range(len(array)))
    return [float(array[span].mean()) for span in spans]


def steps_to_target(steps: Sequence[int], values: Sequence[float], target: float) -> float:
    """Return where the values, joined by straight lines, first are at the target; NaN if they never are."""
    for n, value in enumerate(values):
        if value >= target:
            if n == 0:
                return float(steps[0])
            before = values[n - 1]
            return steps[n - 1] + (steps[n] - steps[n - 1]) * (target - before) / (value - before)
    return nan
