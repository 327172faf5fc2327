"""Take tokens of older policy versions out of training: a generation may have outlived several versions."""

from dataclasses import replace

import numpy as np

from actors.environments.base import AgentTrajectory
from bus.codec import Json


def without_older_versions(trajectory: AgentTrajectory, max_lag: int) -> AgentTrajectory:
    """Mask tokens whose version lags the trajectory's newest by more than `max_lag`.

    They stay as context, and the metadata says how many there are and which versions sampled them. With 0
    only tokens of the newest version are trained on (slime's `mask-offpolicy-in-partial-rollout`)."""
    sampled = trajectory.loss_mask
    newest = int(trajectory.policy_versions[sampled].max(initial=-1))
    older = sampled & (trajectory.policy_versions < newest - max_lag)
    if not older.any():
        return trajectory
    versions: list[Json] = [int(version) for version in np.unique(trajectory.policy_versions[older])]
    return replace(
        trajectory,
        loss_mask=sampled & ~older,
        behaviour_logprobs=np.where(older, np.float32(0), trajectory.behaviour_logprobs),
        policy_versions=np.where(older, np.int32(-1), trajectory.policy_versions),
        metadata={
            **trajectory.metadata,
            "masked_tokens": int(np.count_nonzero(older)),
            "masked_versions": versions,
        },
    )
