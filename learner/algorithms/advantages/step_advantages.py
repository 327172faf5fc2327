"""From the rewards of a step to its advantages: a function of the user's, shaping, estimation, whitening."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from bus.errors import ConfigError
from bus.trajectory import LARGEST_REWARD, Groups, Trajectory
from learner.algorithms.advantages.gae import CriticValues, value_targets
from learner.algorithms.advantages.whitening import trained_tokens, whitened
from learner.algorithms.losses.kl import kl_estimates
from learner.algorithms.plugin import asked_for, chosen_function
from learner.config.advantage import OVERLONG, AdvantageEstimator, OverlongPenalty
from learner.config.frozen_policies import ReferenceConfig
from learner.config.learner import LearnerConfig
from learner.data.packing import Sample
from learner.distributed.exact_sums import SumsOverRanks, exact_sums

TokenPenalties = list[list[float | NDArray[np.float64]]]
"""What the reward of each token loses, by group and trajectory; 0 for what is not trained."""
Advantage = float | NDArray[np.floating]
"""A trajectory's advantage: one for all its tokens, or [L]."""
Estimator = Callable[..., Sequence[Sequence[Advantage]]]
"""An estimator takes this rank's groups, in which all trajectories of a prompt are together, trained or not,
with episodes, agents, turns and rewards; and what it has parameters for of `Offered`. It returns an advantage
for each trajectory; those of what is not trained are ignored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offered:
    """Says what an estimator gets beside the groups, if it has a parameter of that name."""

    sums: SumsOverRanks = exact_sums
    """Adds up rows of numbers over all data-parallel ranks (learner/distributed/exact_sums.py)."""
    token_penalties: Sequence[Sequence[Advantage]] | None = None
    """What is taken from the reward of each token of each trajectory, one number or [L]; None takes nothing.
    From the rewards that the groups have it is not taken yet."""
    baselines: dict[str, float] = field(default_factory=dict)
    """Numbers by name that the estimator changes in place and finds again at the next step, also after a
    resume."""
    critic: CriticValues | None = None
    """What the critic thinks of the trajectories; None where there is no critic."""


NOTHING = Offered()


def advantage_estimator(config: AdvantageEstimator) -> Estimator:
    """Return the configured estimator. Raises `ConfigError` for a user's function that cannot be loaded."""
    return chosen_function("advantage", config)


def takes_token_penalties(config: AdvantageEstimator) -> bool:
    """Tell whether the estimator itself takes what each token's reward loses."""
    return "token_penalties" in asked_for("advantage", advantage_estimator(config))


def estimate_advantages(
    config: AdvantageEstimator, groups: Groups, offered: Offered = NOTHING
) -> list[list[Advantage]]:
    """Advantages of each group's trajectories. Raises `ConfigError` when a user's function misfits."""
    estimator = advantage_estimator(config)
    given = {name: getattr(offered, name) for name in asked_for("advantage", estimator)}
    if given.get("token_penalties", ()) is None:
        given["token_penalties"] = [[0.0] * len(group) for group in groups]
    if given.get("critic", ()) is None:
        raise ConfigError(
            f"advantage {config.type}: it has a parameter `critic`, and there is none: set "
            "learner.critic.train=always"
        )
    found = [list(group) for group in estimator(groups, **given)]
    if [len(group) for group in found] != [len(group) for group in groups]:
        raise ConfigError(
            f"advantage {config.type}: it returned {[len(group) for group in found]} advantages for groups "
            f"of {[len(group) for group in groups]} trajectories: return one for each"
        )
    for group, advantages in zip(groups, found, strict=True):
        for trajectory, advantage in zip(group, advantages, strict=True):
            if trajectory.is_trained:
                _refuse_misfit(trajectory, advantage)
    return found


def _refuse_misfit(trajectory: Trajectory, advantage: Advantage) -> None:
    values, length = np.asarray(advantage), len(trajectory.token_ids)
    if values.shape not in ((), (length,)) or not np.isfinite(values).all():
        raise ConfigError(
            f"the advantage of {trajectory.trajectory_id} has shape {list(values.shape)} and "
            f"{'finite' if np.isfinite(values).all() else 'non-finite'} values: it is to be a finite number, "
            f"or {length} of them, one for each token"
        )
    if np.abs(values).max(initial=0.0) > LARGEST_REWARD:
        raise ConfigError(
            f"the advantage of {trajectory.trajectory_id} is up to {np.abs(values).max()}, beyond float32: "
            "have the environment give smaller rewards"
        )


def advantages_of_step(
    groups: Groups, samples: Sequence[Sample], learner: LearnerConfig, *,
    sums: SumsOverRanks, baselines: Mapping[str, float],
) -> tuple[Sequence[Sequence[Advantage]], dict[str, float]]:  # fmt: skip
    """Return the advantage of each trajectory, and the baselines for the next step. Every rank calls this.

    Raises `ConfigError` for a function of the user's that misfits, and for rewards that an estimator cannot
    take. `samples` are of the trained trajectories of `groups`, in that order, with the log-probs of all
    passes; `baselines` are what the step before left, the same on every rank."""
    shaped, penalties = _shaped(groups, samples, learner)
    critic = CriticValues.from_samples(groups, samples, learner.critic) if learner.has_critic else None
    offered = Offered(sums=sums, token_penalties=penalties, baselines=dict(baselines), critic=critic)
    advantages: Sequence[Sequence[Advantage]] = estimate_advantages(learner.advantage, shaped, offered)
    if learner.whiten_advantages:
        advantages = whitened(groups, advantages, sums, over="tokens")
    return advantages, offered.baselines


def with_value_targets(groups: Groups, samples: Sequence[Sample], learner: LearnerConfig) -> Sequence[Sample]:
    """Return the samples with what the critic is to learn about them, from the rewards as they are shaped.

    They come as `advantages_of_step` got them; without a critic they stay as they are."""
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
    shaped = with_overlong_penalties(groups, learner.overlong)
    penalties = reference_penalties(shaped, samples, learner.reference)
    if penalties is not None and not takes_token_penalties(learner.advantage):
        return with_token_penalties(shaped, penalties), None
    return shaped, penalties


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

    The policy is the one that sampled, by its recorded log-probs (arXiv:2501.03262, eq. 9, with k1).
    `samples` are of the trained trajectories, in that order, with `reference_logprobs`."""
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
