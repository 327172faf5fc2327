"""Advantages of mean 0 and variance 1 over everything that a step trains on."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from bus.trajectory import Groups, Trajectory
from learner.distributed.exact_sums import Rows, SumsOverRanks

Advantages = Sequence[Sequence[float | np.ndarray]]
VARIANCE_FLOOR = 1e-8
"""Added to the variance before its root divides."""
ROUNDING = 1e-12
"""Deviation, as a part of the mean, below which the advantages are all the same but for rounding."""


def trained_tokens(trajectory: Trajectory) -> np.ndarray:
    """Return which tokens are trained, bool [L]: those of the mask, but never the first."""
    mask = np.array(trajectory.loss_mask)
    mask[:1] = False
    return mask


def whitened(
    groups: Groups, advantages: Advantages, sums: SumsOverRanks, *, over: Literal["tokens", "trajectories"]
) -> list[list[float | np.ndarray]]:
    """Subtract the mean and divide by the deviation over all ranks, for each trained policy by itself.

    The variance is that of a sample (divided by n - 1), and 1e-8 is added to it, as slime and verl do. Ranks
    without tokens take part. Where all advantages are equal, or there is only one, they become 0.

    Args:
        groups: trajectories of one prompt each; those that are not trained count nowhere and get 0.
        advantages: of each trajectory, one or [L].
        sums: adds up over ranks.
        over: whether each trained token counts once, or each trajectory, whose advantage is one then."""
    pairs = [
        (trajectory, np.asarray(advantage, np.float64))
        for group, found in zip(groups, advantages, strict=True)
        for trajectory, advantage in zip(group, found, strict=True)
        if trajectory.is_trained
    ]
    moments = _moments(pairs, sums, over)
    return [
        [
            _whitened(trajectory, np.asarray(advantage, np.float64), moments)
            for trajectory, advantage in zip(group, found, strict=True)
        ]
        for group, found in zip(groups, advantages, strict=True)
    ]


Pairs = Sequence[tuple[Trajectory, np.ndarray]]


def _moments(
    pairs: Pairs, sums: SumsOverRanks, over: Literal["tokens", "trajectories"]
) -> dict[str, tuple[float, float]]:
    first = sums(_rows(pairs, over, {}))
    means = {policy: float(total / count) for policy, (count, total, _) in first.items()}
    second = sums(_rows(pairs, over, means))
    return {
        policy: (means[policy], float(squares / (count - 1)) if count > 1 else 0.0)
        for policy, (count, _, squares) in second.items()
    }


def _rows(pairs: Pairs, over: Literal["tokens", "trajectories"], means: dict[str, float]) -> Rows:
    rows: dict[str, list[tuple[float, float, float]]] = {}
    for trajectory, advantage in pairs:
        mask = trained_tokens(trajectory)
        count = int(mask.sum()) if over == "tokens" else 1
        values = advantage - means.get(trajectory.policy, 0.0)
        if values.ndim:
            values = values[mask]
            total, squares = float(values.sum()), float((values**2).sum())
        else:
            total, squares = float(count * values), float(count * values**2)
        if count:
            rows.setdefault(trajectory.policy, []).append((count, total, squares))
    return rows


def _whitened(
    trajectory: Trajectory, advantage: np.ndarray, moments: dict[str, tuple[float, float]]
) -> float | np.ndarray:
    if not trajectory.is_trained or trajectory.policy not in moments:
        return 0.0
    mean, variance = moments[trajectory.policy]
    if variance <= (ROUNDING * mean) ** 2:
        return 0.0
    found = (advantage - mean) / np.sqrt(variance + VARIANCE_FLOOR)
    return np.where(trained_tokens(trajectory), found, 0.0) if found.ndim else float(found)
