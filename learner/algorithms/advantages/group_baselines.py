"""Rewards relative to those of other rollouts of the prompt."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial

import numpy as np

from bus.agent_rewards import are_equal
from bus.errors import ConfigError
from bus.trajectory import Groups, Trajectory
from learner.algorithms.advantages.whitening import whitened
from learner.distributed.exact_sums import SumsOverRanks

Value = Callable[[Trajectory], float | None]
"""What is compared of a trajectory, such as its reward; None where it has no such thing."""
Relative = Callable[[np.ndarray], np.ndarray]
"""Turns values of peers, [G], into their advantages, [G]."""
PeerKeys = Callable[[Trajectory], tuple[Hashable, Hashable]]
"""Says which trajectories are compared with each other, and which of those count once, with their mean."""


def rollouts_of_agent(trajectory: Trajectory) -> tuple[Hashable, Hashable]:
    """Compare an agent with itself in the other rollouts; its trajectories in one of them count once.

    Rewards of different agents are of different scales and for answers to different prompts, so each (policy,
    agent) has a baseline of its own (agent-wise groups, arXiv:2510.11062). Forks of one rollout are not
    independent of each other."""
    return (trajectory.policy, trajectory.agent), trajectory.rollout


def relative_to_peers(
    group: Sequence[Trajectory], value: Value, relative: Relative, peers: PeerKeys = rollouts_of_agent
) -> list[float | None]:
    """Return the advantage of each trajectory of a prompt by `relative`, which sees the values of peers.

    Trajectories that are not trained, or have no value, are in no baseline and get None."""
    values: dict[Hashable, dict[Hashable, list[float]]] = {}
    places: list[tuple[Hashable, Hashable] | None] = []
    for trajectory in group:
        found = value(trajectory) if trajectory.is_trained else None
        places.append(None if found is None else peers(trajectory))
        if found is not None:
            whose, unit = peers(trajectory)
            values.setdefault(whose, {}).setdefault(unit, []).append(found)
    advantages: dict[tuple[Hashable, Hashable], float] = {}
    for whose, units in values.items():
        means = np.array([sum(parts) / len(parts) for parts in units.values()])
        advantages |= {(whose, unit): float(a) for unit, a in zip(units, relative(means), strict=True)}
    return [None if place is None else advantages[place] for place in places]


def rewards_relative_to_peers(
    group: Sequence[Trajectory], relative: Relative, peers: PeerKeys = rollouts_of_agent
) -> list[float]:
    """Return the advantages of the outcomes' rewards; 0 for what is not trained."""
    return [found or 0.0 for found in relative_to_peers(group, lambda t: t.reward, relative, peers)]


def rloo_advantages(groups: Groups) -> list[list[float]]:
    """Compare each rollout with the mean of the others (RLOO, arXiv:2402.14740), agent by agent.

    The baseline does not depend on the rollout itself, so the gradient is unbiased with any size of group."""
    return [rewards_relative_to_peers(group, leave_one_out) for group in groups]


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """Return each reward less the mean of the others, float64 [G]; 0 when there is only one.

    r_i - mean of the others = G / (G - 1) * (r_i - mean of all)."""
    if are_equal(rewards):
        return np.zeros(len(rewards))
    centred: np.ndarray = rewards - rewards.mean()
    return centred * len(rewards) / (len(rewards) - 1)


def maxrl_advantages(groups: Groups) -> list[list[float]]:
    """Weigh a prompt by the inverse of its success rate (MaxRL, arXiv:2602.02710), agent by agent.

    With rewards of 0 and 1, (r - mean) / mean is the estimator of the gradient of log(success rate), the
    likelihood of a correct answer, up to the order that the size of the group allows.

    Raises `ConfigError` for a trained trajectory with a negative reward."""
    for trajectory in (t for group in groups for t in group if t.is_trained):
        if trajectory.reward < 0:
            raise ConfigError(
                f"learner.advantage.type=maxrl divides by the mean reward, and {trajectory.trajectory_id} "
                f"has {trajectory.reward}: it needs rewards of at least 0, such as 0 and 1; grpo takes any"
            )
    return [rewards_relative_to_peers(group, over_mean) for group in groups]


def over_mean(rewards: np.ndarray) -> np.ndarray:
    """Return (reward - mean) / mean, float64 [G]; 0 when the rewards are equal, as when all are 0."""
    if are_equal(rewards):
        return np.zeros(len(rewards))
    centred: np.ndarray = rewards - rewards.mean()
    relative: np.ndarray = centred / rewards.mean()
    return relative


def oapl_advantages(groups: Groups, *, value_kl_weight: float) -> list[list[float]]:
    """Compare each rollout with the optimal value of its prompt (OAPL, arXiv:2602.19362, eq. 3), agent by
    agent.

    The policy that maximises reward less b KL(policy || sampling policy) has the value b log E exp(reward /
    b) under the sampling policy; the mean over the group estimates it, with b = `value_kl_weight`."""
    return [
        rewards_relative_to_peers(group, partial(less_optimal_value, value_kl_weight=value_kl_weight))
        for group in groups
    ]


def less_optimal_value(rewards: np.ndarray, *, value_kl_weight: float) -> np.ndarray:
    """Return each reward less b log mean exp(reward / b), float64 [G]; 0 where all are equal."""
    scaled = rewards / value_kl_weight
    largest = scaled.max()  # the exponentials stay at most 1
    value = value_kl_weight * (largest + np.log(np.exp(scaled - largest).mean()))
    less: np.ndarray = rewards - value
    return less


def grpo_advantages(groups: Groups, *, normalize_std: bool, std_floor: float) -> list[list[float]]:
    """Compare each agent of an episode with itself in the other episodes of its group.

    The baseline is that of arXiv:2402.03300, eq. 3, with outcome rewards, for each agent
    (`rollouts_of_agent`). Without the division it is that of Dr. GRPO (arXiv:2503.20783), which also divides
    the loss by a constant.

    Args:
        groups: trajectories of one prompt each. Those that are not trained are in no baseline and get 0.
        normalize_std: divide by the population standard deviation.
        std_floor: added to the standard deviation.

    Returns the advantage of each trajectory, the same at all its tokens."""
    relative = partial(relative_rewards, normalize_std=normalize_std, std_floor=std_floor)
    return [rewards_relative_to_peers(group, relative) for group in groups]


def relative_rewards(rewards: np.ndarray, *, normalize_std: bool, std_floor: float) -> np.ndarray:
    """Reward less the mean, divided by the deviation if so wished.

    Args:
        rewards: [G], of one agent in the rollouts of one prompt.
        normalize_std: divide by the population standard deviation.
        std_floor: added to the standard deviation.

    Returns float32 [G]; all 0 when the rewards are equal, but for rounding, or there is only one."""
    centred = np.asarray(rewards, np.float64) - np.mean(rewards, dtype=np.float64)
    if are_equal(rewards):
        return np.zeros(len(centred), np.float32)
    if normalize_std:
        centred /= centred.std() + std_floor
    return centred.astype(np.float32)


def gdpo_advantages(
    groups: Groups, *, rewards: Mapping[str, float], std_floor: float, sums: SumsOverRanks
) -> list[list[float | np.ndarray]]:
    """Normalise each reward in the group, add them by weight, and whiten the sum over the step.

    GDPO (arXiv:2601.05242): rewards that are added first let different combinations collapse into the same
    advantage. The last step is over the trajectories of all ranks, for each trained policy.

    Args:
        groups: trajectories of one prompt each. Those that are not trained are in no baseline and get 0.
        sums: adds up over ranks.

    Raises `ConfigError` for a trained trajectory that lacks one of the rewards."""
    relative = partial(relative_rewards, normalize_std=True, std_floor=std_floor)
    added: list[list[float]] = []
    for group in groups:
        parts = [
            [weight * (found or 0.0) for found in relative_to_peers(group, partial(_part, name), relative)]
            for name, weight in rewards.items()
        ]
        added.append([sum(of_trajectory) for of_trajectory in zip(*parts, strict=True)])
    return whitened(groups, added, sums, over="trajectories")


def _part(name: str, trajectory: Trajectory) -> float:
    if name not in trajectory.reward_components:
        there = ", ".join(sorted(trajectory.reward_components)) or "none"
        raise ConfigError(
            f"learner.advantage.rewards names {name!r}, and {trajectory.trajectory_id} has the reward "
            f"components {there}: have the environment or the reward return it, or name another"
        )
    return trajectory.reward_components[name]


def hierarchical_advantages(
    groups: Groups, *, within_episode: Sequence[str], normalize_std: bool, std_floor: float
) -> list[list[float]]:
    """Compare some agents within their episode, and the others with themselves in the other episodes.

    Where one agent of an episode poses a problem and another attempts it several times, the attempts are at
    that problem: those of another episode are at another. What was forked from an attempt belongs to it.

    Args:
        groups: trajectories of one prompt each. Those that are not trained are in no baseline and get 0.

    Returns the advantage of each trajectory, the same at all its tokens."""
    relative = partial(relative_rewards, normalize_std=normalize_std, std_floor=std_floor)
    return [
        rewards_relative_to_peers(group, relative, _peers(group, frozenset(within_episode)))
        for group in groups
    ]


def _peers(group: Sequence[Trajectory], within_episode: frozenset[str]) -> PeerKeys:
    by_id = {trajectory.trajectory_id: trajectory for trajectory in group}

    def peers(trajectory: Trajectory) -> tuple[Hashable, Hashable]:
        if trajectory.agent not in within_episode:
            return rollouts_of_agent(trajectory)
        whose = (trajectory.policy, trajectory.agent, trajectory.rollout)
        return whose, _attempt(trajectory, by_id)

    return peers


def _attempt(trajectory: Trajectory, by_id: Mapping[str, Trajectory]) -> str:
    seen: set[str] = set()
    while trajectory.parent is not None and trajectory.trajectory_id not in seen:
        seen.add(trajectory.trajectory_id)  # a ring of parents cannot be, but would hang the learner
        parent = by_id.get(trajectory.parent.trajectory_id)
        if parent is None or parent.agent != trajectory.agent:
            break
        trajectory = parent
    return trajectory.trajectory_id
