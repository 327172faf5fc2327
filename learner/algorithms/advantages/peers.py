"""Compares what an agent achieved with what the same agent achieved in the other rollouts of the prompt."""

from collections.abc import Callable, Hashable, Sequence

import numpy as np

from bus.trajectory import Trajectory

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

    Trajectories that are not trained, or have no value, are in no baseline and get None.
    """
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
