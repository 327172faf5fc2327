"""Groups of trajectories with rewards."""

from dataclasses import replace

import numpy as np

from bus.trajectory import Trajectory, Turn
from tests.factories import make_trajectory


def group(*rewards: float, lease: int = 0, tokens: int = 8, **changes: object) -> list[Trajectory]:
    """A rollout of a prompt for each reward, half of whose tokens are sampled."""
    return [
        replace(make_trajectory(lease, n, group_size=len(rewards), tokens=tokens, reward=reward), **changes)
        for n, reward in enumerate(rewards)
    ]


def with_turns(trajectory: Trajectory, *rewards: float | None) -> Trajectory:
    """The trajectory with a turn for each reward: after two tokens of prompt, two sampled and one read."""
    length = 2 + 3 * len(rewards)
    turns = tuple(Turn(2 + 3 * n, 4 + 3 * n, "stop", reward=reward) for n, reward in enumerate(rewards))
    mask = np.zeros(length, bool)
    for turn in turns:
        mask[turn.start : turn.stop] = True
    changed = replace(
        trajectory,
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=mask,
        behaviour_logprobs=np.where(mask, -1, 0).astype(np.float32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        turns=turns,
    )
    changed.check()
    return changed
