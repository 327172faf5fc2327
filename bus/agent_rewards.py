"""Outcome rewards by agent and episode: what may be compared within a group."""

from collections.abc import Iterable
from typing import NamedTuple


class AgentReward(NamedTuple):
    """The outcome's reward of a trajectory that is trained, and whose part of which episode it is."""

    policy: str
    agent: str
    rollout: int
    reward: float


def episode_rewards(rewards: Iterable[AgentReward]) -> dict[tuple[str, str], dict[int, float]]:
    """Return the rewards of a group by (policy, agent), one for each episode: what may be compared with each
    other.

    Trajectories of one agent in one episode, as of forked contexts, count once, with their mean: an episode
    that forked often would otherwise weigh more than its siblings."""
    found: dict[tuple[str, str], dict[int, list[float]]] = {}
    for policy, agent, rollout, reward in rewards:
        found.setdefault((policy, agent), {}).setdefault(rollout, []).append(reward)
    return {
        whose: {rollout: sum(parts) / len(parts) for rollout, parts in episodes.items()}
        for whose, episodes in found.items()
    }
