"""Advantages over the values of a critic, by token or by turn, and what that critic is to learn.

What an environment or a tool wrote is no action: it only leads from one state to the next. So the actions of
a trajectory are its trained tokens, or its turns with a trained token; each trajectory stands for itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from bus.trajectory import Groups, Trajectory
from learner.algorithms.advantages.whitening import trained_tokens
from learner.algorithms.tokens import LARGEST_LOG_RATIO
from learner.config.critic import CriticConfig
from learner.data.packing import Sample

Floats = NDArray[np.float64]


def gae(rewards: Floats, values: Floats, *, discount: float, trace_decay: float) -> Floats:
    """Return the generalised advantage of each action, [n] (arXiv:1506.02438, eq. 16).

    With `discount` and `trace_decay` of 1 it is the sum of the rewards from the action on, less its value.

    Args:
        rewards: [n], given after each action.
        values: [n], of the state before each action.
        discount: factor of what comes an action later (gamma).
        trace_decay: weight of what comes later against the values (lambda)."""
    surprises = rewards + discount * _next(values) - values
    return _summed_backwards(surprises, np.full(len(values), discount * trace_decay))


def vtrace(
    rewards: Floats, values: Floats, log_ratios: Floats, *,
    discount: float, trace_decay: float, rho_bar: float, c_bar: float,
) -> tuple[Floats, Floats]:  # fmt: skip
    """Return what the values should be, and the advantage of each action, [n] each (arXiv:1802.01561, eq. 1).

    The traces are c_t = `trace_decay` * min(`c_bar`, ratio) (remark 2). The advantage of an action is r +
    discount * q - V(x), where q is a mean of the next state's target, by `trace_decay`, and of its value; its
    importance weight is left to the correction of the loss. Where all ratios are 1, and so are the bounds or
    more, the advantages are those of `gae` and the targets those advantages on top of the values.

    Args:
        rewards: [n], given after each action.
        values: [n], of the state before each action.
        log_ratios: [n] nats, of the policy before the step over the one that sampled, of whole actions.
        discount: factor of what comes an action later (gamma).
        trace_decay: weight of what comes later against the values (lambda).
        rho_bar: upper bound on the weight of an action.
        c_bar: upper bound on the weight by which later actions count, at most 1."""
    ratios = np.exp(np.minimum(log_ratios, LARGEST_LOG_RATIO))
    surprises = rewards + discount * _next(values) - values
    traces = discount * trace_decay * np.minimum(c_bar, ratios)
    changes = _summed_backwards(np.minimum(rho_bar, ratios) * surprises, traces)
    return values + changes, surprises + discount * trace_decay * _next(changes)


def _next(values: Floats) -> Floats:
    """Return what belongs to the action after each; 0 after the last."""
    return np.append(values[1:], 0.0)


def _summed_backwards(terms: Floats, factors: Floats) -> Floats:
    """Return s, [n], where s[t] = terms[t] + factors[t] * s[t + 1]."""
    pairs = zip(terms[::-1].tolist(), factors[::-1].tolist(), strict=True)
    sums = accumulate(pairs, lambda later, pair: pair[0] + pair[1] * later, initial=0.0)
    return np.array([*sums][:0:-1])


Penalties = Sequence[Sequence[float | NDArray[np.floating]]]
"""What is taken from the reward of each token, of each trajectory: one number or [L]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryValues:
    """Says what a critic thinks of a trajectory of L tokens, before the step."""

    values: NDArray[np.floating]
    """[L], of the state in which each trained token was sampled; whatever elsewhere."""
    log_ratios: NDArray[np.floating] | None = None
    """[L] nats, of the policy before the step over the one that sampled; None where nobody asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticValues:
    """Offers an estimator what the critic of the step says, and how it counts."""

    config: CriticConfig
    of: Sequence[Sequence[TrajectoryValues | None]]
    """Values of each trajectory of each group; None where it is not trained."""

    @classmethod
    def from_samples(cls, groups: Groups, samples: Sequence[Sample], config: CriticConfig) -> Self:
        """Read the values from the `samples` of the trained trajectories, in that order, after all passes."""
        remaining = iter(samples)
        return cls(
            config=config,
            of=[[_values(next(remaining), config) if t.is_trained else None for t in g] for g in groups],
        )


def _values(sample: Sample, config: CriticConfig) -> TrajectoryValues:
    values = np.asarray(sample.streams["values"])
    if config.targets == "gae":
        return TrajectoryValues(values=values)
    behaviour = np.asarray(sample.streams["behaviour_logprobs"], np.float64)
    return TrajectoryValues(
        values=values, log_ratios=np.asarray(sample.streams["proximal_logprobs"]) - behaviour
    )


def gae_advantages(
    groups: Groups, *, trace_decay: float, critic: CriticValues, token_penalties: Penalties
) -> list[list[float | Floats]]:
    """Give each action its generalised advantage, or V-trace's where the critic learns by V-trace.

    The reward of a turn is given after its last action, that of the outcome after the last of all.

    Args:
        groups: trajectories; those that are not trained get 0.
        trace_decay: weight of what comes later against the values (lambda).
        critic: says what the states are worth, and what an action is.
        token_penalties: what is taken from the reward of each token, one number or [L].

    Returns the advantage of each token [L], that of its action; 0 where it is not trained."""
    found: list[list[float | Floats]] = []
    for group, estimates, penalties in zip(groups, critic.of, token_penalties, strict=True):
        found.append([])
        for trajectory, known, lost in zip(group, estimates, penalties, strict=True):
            if known is None:
                found[-1].append(0.0)
                continue
            actions = Actions.of(trajectory, lost, critic.config.level)
            credit = _credit(actions, known, critic.config, trace_decay)
            found[-1].append(actions.spread(credit.advantages))
    return found


def value_targets(groups: Groups, critic: CriticValues, token_penalties: Penalties | None) -> list[Floats]:
    """Return what the critic is to learn about each trained trajectory, in their order.

    It is [L], and NaN where nothing is to be learned: for tokens that are not the first of an action."""
    found = []
    for i, group in enumerate(groups):
        for j, trajectory in enumerate(group):
            known = critic.of[i][j]
            if known is None:
                continue
            lost = 0.0 if token_penalties is None else token_penalties[i][j]
            actions = Actions.of(trajectory, lost, critic.config.level)
            targets = np.full(len(trajectory.token_ids), np.nan)
            credit = _credit(actions, known, critic.config, critic.config.trace_decay)
            targets[actions.first] = credit.targets
            found.append(targets)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Actions:
    """Describes the n actions of a trajectory of L tokens."""

    first: NDArray[np.intp]
    """[n], the token with which each action begins: its state is the one before this token."""
    tokens: NDArray[np.intp]
    """The trained tokens."""
    of_token: NDArray[np.intp]
    """Which action each trained token belongs to."""
    rewards: Floats
    """[n], what each was rewarded for, less the penalties of its tokens."""
    length: int

    @classmethod
    def of(
        cls, trajectory: Trajectory, penalties: float | NDArray[np.floating], level: Literal["token", "turn"]
    ) -> Self:
        """Find the actions of a trained trajectory; `penalties` are one number for each token, or [L]."""
        tokens = np.flatnonzero(trained_tokens(trajectory))
        owner = np.arange(len(tokens))
        if level == "turn":
            begins = np.array([turn.start for turn in trajectory.turns])
            owner = np.searchsorted(begins, tokens, side="right") - 1
        _, places, of_token = np.unique(owner, return_index=True, return_inverse=True)
        first, length = tokens[places], len(trajectory.token_ids)
        lost = np.broadcast_to(np.asarray(penalties, np.float64), length)[tokens]
        rewards = -_sums(of_token, lost, len(first))
        for turn in trajectory.turns:
            last = int(np.searchsorted(first, turn.stop)) - 1
            if last >= 0:  # a turn before which nothing was done rewards nothing
                rewards[last] += turn.reward or 0.0
        if len(first):
            rewards[-1] += trajectory.reward
        return cls(first=first, tokens=tokens, of_token=of_token, rewards=rewards, length=length)

    def sums(self, of_tokens: NDArray[np.floating]) -> Floats:
        """Add up values [L] over the tokens of each action, [n]."""
        weights = np.asarray(of_tokens, np.float64)[self.tokens]
        return _sums(self.of_token, weights, len(self.first))

    def spread(self, of_actions: Floats) -> Floats:
        """Give each token the value of its action, [L]; 0 where it is not trained."""
        spread = np.zeros(self.length)
        spread[self.tokens] = of_actions[self.of_token]
        return spread


def _sums(of_token: NDArray[np.intp], values: Floats, actions: int) -> Floats:
    """Add up values of tokens by the action that each belongs to, [actions]."""
    return np.bincount(of_token, weights=values, minlength=actions).astype(np.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Credit:
    advantages: Floats
    targets: Floats


def _credit(actions: Actions, known: TrajectoryValues, config: CriticConfig, trace_decay: float) -> _Credit:
    values = np.asarray(known.values, np.float64)[actions.first]
    if known.log_ratios is None:
        advantages = gae(actions.rewards, values, discount=config.discount, trace_decay=trace_decay)
        return _Credit(advantages=advantages, targets=values + advantages)
    targets, advantages = vtrace(
        actions.rewards, values, actions.sums(known.log_ratios), discount=config.discount,
        trace_decay=trace_decay, rho_bar=config.rho_bar, c_bar=config.c_bar,
    )  # fmt: skip
    return _Credit(advantages=advantages, targets=targets)
