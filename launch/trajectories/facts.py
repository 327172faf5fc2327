"""What is told of a trajectory besides its text, in the terminal and in an export."""

from bus.codec import Json
from bus.trajectory import SOURCE, Trajectory
from launch.trajectories.training import GroupTraining


def facts_of(t: Trajectory, training: GroupTraining) -> dict[str, Json]:
    """Return the facts of a trajectory, whose names docs/operations.md describes."""
    has_mask = bool(t.loss_mask.any())
    source = t.metadata.get(SOURCE)
    return {
        "trajectory_id": t.trajectory_id,
        "lease_id": t.lease_id,
        "rollout": t.rollout,
        "agent": t.agent,
        "policy": t.policy,
        "actor": t.actor,
        "source": None if source is None else str(source),
        "label": training.label,
        "reward": None if t.reward_due else t.reward,
        "reward_components": dict(t.reward_components),
        "reward_source": t.reward_source,
        "advantage": training.advantage(t),
        "importance_ratio": training.mean_ratio(t),
        "end": t.end,
        "trained": t.is_trained,
        "training": training.told(t),
        "tokens": len(t.token_ids),
        "masked_tokens": int(t.loss_mask.sum()),
        "oldest_version": t.oldest_version if has_mask else None,
        "newest_version": t.newest_version if has_mask else None,
        "metadata": dict(t.metadata),
    }
