"""Small valid messages for tests."""

import numpy as np

from bus.messages import Lease, Prompt, group_name
from bus.trajectory import KeptTurn, Trajectory, Turn


def make_trajectory(
    lease_id: int = 0,
    sample: int = 0,
    *,
    group_size: int = 2,
    tokens: int = 8,
    policy_version: int = 0,
    reward: float = 1.0,
) -> Trajectory:
    """A valid trajectory: its first half is prompt, its second half sampled under `policy_version`."""
    mask = np.arange(tokens) >= tokens // 2
    seed = np.random.default_rng([lease_id, sample])
    return Trajectory(
        trajectory_id=f"{group_name(lease_id)}.{sample}",
        group_id=group_name(lease_id),
        lease_id=lease_id,
        sample=sample,
        group_size=group_size,
        rollout=sample,
        token_ids=seed.integers(0, 1000, tokens, dtype=np.int32),
        loss_mask=mask,
        behaviour_logprobs=np.where(mask, -seed.random(tokens), 0).astype(np.float32),
        policy_versions=np.where(mask, policy_version, -1).astype(np.int32),
        turns=(Turn(tokens // 2, tokens, "stop"),),
        reward=reward,
        end="completed",
        actor="test",
        metadata={"turns": 1},
    )


def make_turn(
    lease_id: int = 0, rollout: int = 0, number: int = 0, *, tokens: int = 4, policy_version: int = 0
) -> KeptTurn:
    """A valid turn of a rollout that has not ended."""
    seed = np.random.default_rng([lease_id, rollout, number])
    return KeptTurn(
        lease_id=lease_id,
        rollout=rollout,
        number=number,
        context=seed.bytes(16),
        finish_reason="stop",
        token_ids=seed.integers(0, 1000, tokens, dtype=np.int32),
        behaviour_logprobs=(-seed.random(tokens)).astype(np.float32),
        policy_versions=np.full(tokens, policy_version, np.int32),
        actor="test",
    )


def make_lease(lease_id: int = 0, *, samples: int = 2, policy_version: int = 0) -> Lease:
    """A lease on a one-line prompt."""
    prompt = Prompt(content=f"task {lease_id}", label=str(lease_id))
    return Lease(lease_id=lease_id, prompt=prompt, samples=samples, policy_version=policy_version)
