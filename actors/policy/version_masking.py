"""Take tokens out of training that older policy versions sampled, or computed keys and values for. A
generation may have outlived several versions."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from actors.episodes.episode import AgentTrajectory
from bus.codec import Json


@dataclass(frozen=True, slots=True)
class Masking:
    """Which sampled tokens are left out of training."""

    max_lag: int | None = None
    """Versions that a token may lag the newest of its trajectory; `None` for any number."""
    older_kv: bool = False
    """Whether tokens are left out that were sampled over keys and values of older weights than their own."""

    def applied(self, trajectory: AgentTrajectory) -> AgentTrajectory:
        """Return the trajectory with these tokens as context only."""
        if self.older_kv:
            trajectory = without_older_kv(trajectory)
        return trajectory if self.max_lag is None else without_older_versions(trajectory, self.max_lag)


TRAIN_ALL = Masking()
"""Leaves nothing out."""


def without_older_versions(trajectory: AgentTrajectory, max_lag: int) -> AgentTrajectory:
    """Mask tokens whose version lags the trajectory's newest by more than `max_lag`. They stay as context,
    and the metadata says how many there are and which versions sampled them. With 0 only tokens of the newest
    version are trained on (slime's `mask-offpolicy-in-partial-rollout`)."""
    sampled = trajectory.loss_mask
    newest = int(trajectory.policy_versions[sampled].max(initial=-1))
    older = sampled & (trajectory.policy_versions < newest - max_lag)
    if not older.any():
        return trajectory
    versions: list[Json] = [int(version) for version in np.unique(trajectory.policy_versions[older])]
    masked = int(np.count_nonzero(older))
    return _without(trajectory, older, {"masked_tokens": masked, "masked_versions": versions})


def without_older_kv(trajectory: AgentTrajectory) -> AgentTrajectory:
    """Mask tokens that were sampled over keys and values of older weights than those that sampled them. They
    stay as context, and the metadata says how many there are."""
    if trajectory.kv_versions is None:
        return trajectory
    older = trajectory.loss_mask & (trajectory.kv_versions != trajectory.policy_versions)
    if not older.any():
        return trajectory
    return _without(trajectory, older, {"masked_older_kv_tokens": int(np.count_nonzero(older))})


def _without(
    trajectory: AgentTrajectory, masked: np.ndarray, metadata: Mapping[str, Json]
) -> AgentTrajectory:
    """Return a trajectory with these tokens, bool [L], as context only; with none left it is not trained."""
    left, kv = trajectory.loss_mask & ~masked, trajectory.kv_versions
    return replace(
        trajectory,
        loss_mask=left,
        behaviour_logprobs=np.where(masked, np.float32(0), trajectory.behaviour_logprobs),
        policy_versions=np.where(masked, np.int32(-1), trajectory.policy_versions),
        kv_versions=None if kv is None else np.where(masked, np.int32(-1), kv),
        trainable=trajectory.trainable and bool(left.any()),
        metadata={**trajectory.metadata, **metadata},
    )
