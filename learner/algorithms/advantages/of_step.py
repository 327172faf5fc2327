"""From the rewards of a step to its advantages: shaping, estimation, whitening."""

from collections.abc import Mapping, Sequence

from bus.trajectory import Groups
from learner.algorithms.advantages.estimator import (
    Advantage,
    Offered,
    estimate_advantages,
    takes_token_penalties,
)
from learner.algorithms.advantages.sums import Sums
from learner.algorithms.advantages.whitening import whitened
from learner.algorithms.reward_shaping import (
    reference_penalties,
    with_overlong_penalties,
    with_token_penalties,
)
from learner.config.learner import LearnerConfig
from learner.data.packing import Sample


def advantages_of_step(
    groups: Groups, samples: Sequence[Sample], learner: LearnerConfig, *,
    sums: Sums, baselines: Mapping[str, float],
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
    shaped = with_overlong_penalties(groups, learner.overlong)
    penalties = reference_penalties(shaped, samples, learner.reference)
    if penalties is not None and not takes_token_penalties(learner.advantage):
        shaped, penalties = with_token_penalties(shaped, penalties), None
    offered = Offered(sums=sums, token_penalties=penalties, baselines=dict(baselines))
    advantages: Sequence[Sequence[Advantage]] = estimate_advantages(learner.advantage, shaped, offered)
    if learner.whiten_advantages:
        advantages = whitened(groups, advantages, sums, over="tokens")
    return advantages, offered.baselines
