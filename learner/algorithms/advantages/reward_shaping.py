"""What rewards lose before they become advantages: for length, and for distance from the reference."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from bus.errors import ConfigError
from bus.trajectory import Groups, Trajectory
from learner.algorithms.advantages.whitening import trained_tokens
from learner.algorithms.losses.kl import kl_estimates
from learner.config.advantage import OVERLONG, OverlongPenalty
from learner.config.frozen_policies import ReferenceConfig
from learner.data.packing import Sample

TokenPenalties = list[list[float | NDArray[np.float64]]]
"""What the reward of each token loses, by group and trajectory; 0 for what is not trained."""


def overlong_penalty(tokens: int, *, longest: int, margin: int) -> float:
    """Return what an answer of so many tokens gets for its length, from 0 to -1 (arXiv:2503.14476, eq. 13).

    It is 0 up to `longest - margin` and -1 from `longest` on, and falls evenly in between."""
    if tokens >= longest:
        return -1.0
    return min(0.0, (longest - margin - tokens) / margin) if margin else 0.0


def with_overlong_penalties(groups: Groups, overlong: OverlongPenalty) -> Groups:
    """Return the groups with the penalties in the rewards of what is trained, and among their components.

    An answer is all sampled tokens of the trajectory. Raises `ConfigError` where there is such a component.
    """
    if overlong.longest_tokens is None:
        return groups
    return [[_penalised(t, overlong) if t.is_trained else t for t in group] for group in groups]


def _penalised(trajectory: Trajectory, overlong: OverlongPenalty) -> Trajectory:
    if OVERLONG in trajectory.reward_components:
        raise ConfigError(
            f"{trajectory.trajectory_id} has a reward component {OVERLONG!r} already, and learner.overlong "
            "would add one: have the environment name its own otherwise"
        )
    penalty = overlong.coef * overlong_penalty(
        int(np.count_nonzero(trajectory.loss_mask)),
        longest=overlong.longest_tokens or 0,
        margin=overlong.margin_tokens,
    )
    return replace(
        trajectory,
        reward=trajectory.reward + penalty,
        reward_components={**trajectory.reward_components, OVERLONG: penalty},
    )


def reference_penalties(
    groups: Groups, samples: Sequence[Sample], reference: ReferenceConfig
) -> TokenPenalties | None:
    """Return `kl_coef` times the estimated KL from the reference of each token; None if rewards lose nothing.

    The policy is the one that sampled, by its recorded log-probs (arXiv:2501.03262, eq. 9, with k1)."""
    if reference.kl_coef == 0 or reference.kl_in != "reward":
        return None
    remaining = iter(samples)
    return [
        [_of_sample(t, next(remaining), reference) if t.is_trained else 0.0 for t in group]
        for group in groups
    ]


def _of_sample(trajectory: Trajectory, sample: Sample, reference: ReferenceConfig) -> NDArray[np.float64]:
    mask = trained_tokens(trajectory)
    kl = kl_estimates(
        torch.from_numpy(trajectory.behaviour_logprobs[mask].astype(np.float64)),
        torch.from_numpy(np.asarray(sample.streams["reference_logprobs"])[mask].astype(np.float64)),
        estimator=reference.kl_estimator,
    )
    penalties = np.zeros(len(mask))
    penalties[mask] = reference.kl_coef * kl.numpy()
    return penalties


def with_token_penalties(groups: Groups, penalties: TokenPenalties) -> Groups:
    """Return the groups with the sum of its tokens' penalties taken from each trajectory's reward.

    This is the reward of RLOO (arXiv:2402.14740), for estimators that know the outcome alone."""
    return [
        [replace(t, reward=t.reward - float(np.sum(lost))) for t, lost in zip(group, of_group, strict=True)]
        for group, of_group in zip(groups, penalties, strict=True)
    ]
