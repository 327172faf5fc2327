"""From the groups that replay gave to a step to the micro-batches the trainer takes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from bus.messages import Trajectory
from learner.advantages.grpo import grpo_advantages
from learner.config import AdvantageConfig, BatchConfig
from learner.packing import MicroBatch, Sample, pack


@dataclass(frozen=True)
class StepBatch:
    """Everything one optimizer step trains on, and what is worth knowing about it."""

    micro_batches: list[MicroBatch]
    trajectories: int
    tokens: int
    """Prompt and response."""
    reward_mean: float
    staleness_max: int
    """Versions that the oldest trained token lags behind the learner; a token from a later version of a
    learner that died counts as 0."""
    staleness_mean: float
    """Over trajectories."""
    response_tokens_mean: float

    def xxh3(self) -> str:
        """Digest of what the trainer gets, hexadecimal: equal for batches that are equal bit for bit."""
        digest = xxhash.xxh3_128()
        for micro_batch in self.micro_batches:
            micro_batch.add_to(digest)
        return digest.hexdigest()


def make_step_batch(
    groups: Sequence[Sequence[Trajectory]], *,
    policy_version: int, advantage: AdvantageConfig, batch: BatchConfig, weights: Sequence[float] = (),
) -> StepBatch:  # fmt: skip
    """Advantages within each group, times the group's importance weight (1 by default), then packing."""
    samples: list[Sample] = []
    for group, weight in zip(groups, weights or [1.0] * len(groups), strict=True):
        advantages = grpo_advantages(
            np.array([trajectory.reward for trajectory in group]),
            normalize_std=advantage.normalize_std,
            std_floor=advantage.std_floor,
        )
        samples += [_sample(t, weight * float(a)) for t, a in zip(group, advantages, strict=True)]
    trajectories = [trajectory for group in groups for trajectory in group]
    staleness = [max(0, policy_version - trajectory.oldest_version) for trajectory in trajectories]
    return StepBatch(
        micro_batches=pack(samples, batch.tokens_per_micro_batch),
        trajectories=len(trajectories),
        tokens=sum(len(t.token_ids) for t in trajectories),
        reward_mean=float(np.mean([t.reward for t in trajectories])),
        staleness_max=max(staleness),
        staleness_mean=float(np.mean(staleness)),
        response_tokens_mean=float(np.mean([t.loss_mask.sum() for t in trajectories])),
    )


def _sample(trajectory: Trajectory, advantage: float) -> Sample:
    return Sample(
        token_ids=trajectory.token_ids,
        loss_mask=trajectory.loss_mask,
        behaviour_logprobs=trajectory.behaviour_logprobs,
        policy_versions=trajectory.policy_versions,
        advantage=advantage,
    )
