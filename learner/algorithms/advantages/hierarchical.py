"""Rewards relative to those of other attempts at the same thing, in the episode or in the group."""

from collections.abc import Hashable, Mapping, Sequence
from functools import partial

from bus.trajectory import Groups, Trajectory
from learner.algorithms.advantages.grpo import relative_rewards
from learner.algorithms.advantages.peers import PeerKeys, rewards_relative_to_peers, rollouts_of_agent


def hierarchical_advantages(
    groups: Groups, *, within_episode: Sequence[str], normalize_std: bool, std_floor: float
) -> list[list[float]]:
    """Compare some agents within their episode, and the others with themselves in the other episodes.

    Where one agent of an episode poses a problem and another attempts it several times, the attempts are at
    that problem: those of another episode are at another. What was forked from an attempt belongs to it.

    Args:
        groups: trajectories of one prompt each. Those that are not trained are in no baseline and get 0.

    Returns the advantage of each trajectory, the same at all its tokens.
    """
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
    """Return the name of the trajectory of the same agent that this one was forked from first."""
    seen: set[str] = set()
    while trajectory.parent is not None and trajectory.trajectory_id not in seen:
        seen.add(trajectory.trajectory_id)  # a ring of parents cannot be, but would hang the learner
        parent = by_id.get(trajectory.parent.trajectory_id)
        if parent is None or parent.agent != trajectory.agent:
            break
        trajectory = parent
    return trajectory.trajectory_id
