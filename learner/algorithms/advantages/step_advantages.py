"""From the rewards of a step to its advantages: a function of the user's, shaping, estimation, whitening."""

from collections.abc import Mapping, Sequence

import numpy as np

from bus.trajectory import Groups
from learner.algorithms.advantages.estimator import (
    Advantage,
    Offered,
    estimate_advantages,
    takes_token_penalties,
)
from learner.algorithms.advantages.gae import CriticValues, value_targets
from learner.algorithms.advantages.reward_shaping import (
    TokenPenalties,
    reference_penalties,
    with_overlong_penalties,
    with_token_penalties,
)
from learner.algorithms.advantages.whitening import whitened
from learner.config.learner import LearnerConfig
from learner.data.packing import Sample
from learner.distributed.exact_sums import SumsOverRanks


def advantages_of_step(
    groups: Groups, samples: Sequence[Sample], learner: LearnerConfig, *,
    sums: SumsOverRanks, baselines: Mapping[str, float],
) -> tuple[Sequence[Sequence[Advantage]], dict[str, float]]:  # fmt: skip
    """Return the advantage of each trajectory, and the baselines for the next step. Every rank calls this.

    Args:
        groups: those of this rank.
        samples: of their trained trajectories, in that order, with the log-probs of all passes.
        learner: says how.
        sums: adds up over ranks.
        baselines: what the step before left, the same on every rank; it stays as it is.

    Raises `ConfigError` for a function of the user's that misfits, and for rewards that an estimator cannot
    take.
    """
    shaped, penalties = _shaped(groups, samples, learner)
    critic = CriticValues.from_samples(groups, samples, learner.critic) if learner.has_critic else None
    offered = Offered(sums=sums, token_penalties=penalties, baselines=dict(baselines), critic=critic)
    advantages: Sequence[Sequence[Advantage]] = estimate_advantages(learner.advantage, shaped, offered)
    if learner.whiten_advantages:
        advantages = whitened(groups, advantages, sums, over="tokens")
    return advantages, offered.baselines


def with_value_targets(groups: Groups, samples: Sequence[Sample], learner: LearnerConfig) -> Sequence[Sample]:
    """Return the samples with what the critic is to learn about them, from the rewards as they are shaped.

    They come as `advantages_of_step` got them; without a critic they stay as they are.
    """
    if not learner.has_critic:
        return samples
    shaped, penalties = _shaped(groups, samples, learner)
    critic = CriticValues.from_samples(groups, samples, learner.critic)
    targets = value_targets(shaped, critic, penalties)
    return [
        sample.with_streams(value_targets=found.astype(np.float32))
        for sample, found in zip(samples, targets, strict=True)
    ]


def _shaped(
    groups: Groups, samples: Sequence[Sample], learner: LearnerConfig
) -> tuple[Groups, TokenPenalties | None]:
    """Return the groups with the rewards that count, and the penalties of tokens that these do not have."""
    shaped = with_overlong_penalties(groups, learner.overlong)
    penalties = reference_penalties(shaped, samples, learner.reference)
    if penalties is not None and not takes_token_penalties(learner.advantage):
        return with_token_penalties(shaped, penalties), None
    return shaped, penalties
