"""Advantages of turns, from the rewards that the environment gave each and that of the outcome."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bus.trajectory import Groups, Trajectory
from learner.algorithms.advantages.group_baselines import (
    Relative,
    relative_rewards,
    relative_to_peers,
    rewards_relative_to_peers,
)


def discounted_return_advantages(
    groups: Groups, *, discount_per_turn: float, baseline: Literal["turn", "none"], normalize_std: bool,
    std_floor: float,
) -> list[list[float | NDArray[np.float64]]]:  # fmt: skip
    """Give each turn the discounted sum of its own reward and those after it.

    The return of turn k is the sum over j >= k of discount^(j - k) r_j; the reward of the outcome is the last
    turn's, beside its own. A baseline makes it the advantage of GTPO (arXiv:2511.14846).

    Args:
        groups: trajectories of one prompt each; those that are not trained get 0.
        baseline: "turn" compares a return with those of the same agent at the same turn in the other rollouts
            of the prompt, so that a turn which no other rollout has gets 0; "none" leaves it as it is.

    Returns the advantage of each token [L], 0 outside of turns."""
    relative = partial(relative_rewards, normalize_std=normalize_std, std_floor=std_floor)
    found: list[list[float | NDArray[np.float64]]] = []
    for group in groups:
        returns: Mapping[str, Sequence[float | None]] = {
            t.trajectory_id: _returns(t, discount_per_turn) for t in group if t.is_trained
        }
        if baseline == "turn":
            returns = _compared_by_turn(group, returns, relative)
        found.append([_spread(t, returns[t.trajectory_id]) if t.is_trained else 0.0 for t in group])
    return found


def turn_credit_advantages(
    groups: Groups, *, outcome_coef: float, normalize_std: bool, std_floor: float
) -> list[list[float | NDArray[np.float64]]]:
    """Give a turn that was rewarded the advantage of its own reward beside that of the outcome.

    MT-GRPO (arXiv:2505.11821): with A_T of the turn's reward among the same turns of the agent's other
    rollouts of the prompt, and A_O of the outcome, a turn with a reward has A_T + `outcome_coef` * A_O, and
    one without has A_O. Without rewards of turns this is GRPO.

    Args:
        groups: trajectories of one prompt each; those that are not trained are in no baseline and get 0.
        outcome_coef: weight of the outcome in a turn with a reward of its own (lambda of the paper).

    Returns the advantage of each token [L], 0 outside of turns."""
    relative = partial(relative_rewards, normalize_std=normalize_std, std_floor=std_floor)
    found: list[list[float | NDArray[np.float64]]] = []
    for group in groups:
        outcomes = rewards_relative_to_peers(group, relative)
        rewards = {t.trajectory_id: [turn.reward for turn in t.turns] for t in group}
        own = _compared_by_turn(group, rewards, relative)
        found.append([
            _spread(t, [outcome if a is None else a + outcome_coef * outcome for a in own[t.trajectory_id]])
            if t.is_trained
            else 0.0
            for t, outcome in zip(group, outcomes, strict=True)
        ])  # fmt: skip
    return found


def _returns(trajectory: Trajectory, discount: float) -> list[float]:
    rewards = [turn.reward or 0.0 for turn in trajectory.turns]
    rewards[-1] += trajectory.reward  # what is trained has a turn
    return [*accumulate(rewards[::-1], lambda later, now: now + discount * later)][::-1]


def _compared_by_turn(
    group: Sequence[Trajectory], values: Mapping[str, Sequence[float | None]], relative: Relative
) -> dict[str, list[float | None]]:
    """Compare the values of a turn with those of the same turn in the agent's other rollouts.

    Values are by trajectory and turn, None where there is none; so is the result."""

    def value(number: int, trajectory: Trajectory) -> float | None:
        of_turns = values.get(trajectory.trajectory_id, ())
        return of_turns[number] if number < len(of_turns) else None

    most = max((len(of_turns) for of_turns in values.values()), default=0)
    columns = [relative_to_peers(group, partial(value, number), relative) for number in range(most)]
    return {
        trajectory.trajectory_id: [column[i] for column in columns[: len(trajectory.turns)]]
        for i, trajectory in enumerate(group)
    }


def _spread(trajectory: Trajectory, values: Sequence[float | None]) -> NDArray[np.float64]:
    spread = np.zeros(len(trajectory.token_ids))
    for turn, value in zip(trajectory.turns, values, strict=True):
        spread[turn.start : turn.stop] = value or 0.0
    return spread
