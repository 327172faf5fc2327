"""Outcome rewards by agent and episode: what may be compared within a group."""

from collections.abc import Iterable
from typing import NamedTuple

EQUAL_RELATIVE, EQUAL_ABSOLUTE = 1e-6, 1e-9
"""Rewards that lie within 1e-6 of the largest of them, or within 1e-9, are equal: the rest is rounding, of
sums in another order or of float32, and divided by its own deviation it would be advantages of size 1."""


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


def are_equal(rewards: Iterable[float]) -> bool:
    """Tell whether rewards that are compared with each other differ by rounding alone (`EQUAL_RELATIVE`)."""
    found = [float(reward) for reward in rewards]
    if not found:
        return True
    low, high = min(found), max(found)
    return high - low <= max(EQUAL_ABSOLUTE, EQUAL_RELATIVE * max(abs(low), abs(high)))
