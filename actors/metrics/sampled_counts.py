"""Counts how much an actor has sampled, also of groups that nobody trains on."""

from collections.abc import Iterable

import numpy as np

from actors.episodes.episode import AgentTrajectory
from bus.actor_counters import SampledCounts


def sampled_counts(trajectories: Iterable[AgentTrajectory]) -> SampledCounts:
    """Return the counts of the trainable ones among these, of whatever end, that have a sampled token."""
    sampled = [part for part in trajectories if part.trainable and part.loss_mask.any()]
    rewarded = [part for part in sampled if part.is_trained and not part.reward_due]
    return SampledCounts(
        trajectories=len(sampled),
        tokens=sum(int(np.count_nonzero(part.loss_mask)) for part in sampled),
        rewarded=len(rewarded),
        reward_sum=float(sum(part.reward for part in rewarded)),
    )
