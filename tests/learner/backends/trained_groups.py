"""Groups of rollouts with known log-probs."""

from dataclasses import replace

import numpy as np
import torch

from bus.trajectory import Trajectory, Turn
from tests.factories import make_trajectory
from tests.learner.tiny import VOCAB, reference_logits

STEPS, GROUPS, ROLLOUTS = 2, 3, 4


def groups_of(name: str, step: int) -> list[list[Trajectory]]:
    """Rollouts of two turns, each an episode of its own, but for attempts that are compared within one."""
    drawn = [[rollout(step, 10 * step + n, sample) for sample in range(ROLLOUTS)] for n in range(GROUPS)]
    if name == "hierarchical":
        return [[replace(t, rollout=t.sample // 2) for t in group] for group in drawn]
    return drawn


def rollout(step: int, lease: int, sample: int) -> Trajectory:
    draw = np.random.default_rng([lease, sample])
    first, second = (int(n) for n in draw.integers(2, 9, 2))
    length = 3 + first + 1 + second
    mask = np.ones(length, bool)
    mask[[0, 1, 2, 3 + first]] = False
    made = make_trajectory(lease, sample, group_size=ROLLOUTS, tokens=length)
    return replace(
        made,
        token_ids=made.token_ids % VOCAB,
        loss_mask=mask,
        behaviour_logprobs=np.where(mask, -np.log(VOCAB) + draw.normal(0, 0.5, length), 0).astype(np.float32),
        policy_versions=np.where(mask, step, -1).astype(np.int32),
        turns=(
            Turn(3, 3 + first, "stop", reward=float(draw.random())),
            Turn(4 + first, length, "stop", reward=float(draw.random()) if sample % 2 else None),
        ),
        reward=float(draw.integers(0, 3)) + (sample == 0),
        reward_components={"correct": float(draw.random()), "format": float(draw.integers(0, 2))},
    )


def logprobs(model, samples) -> list[np.ndarray]:
    """float64 [L] nats, at temperature 1; 0 at the first token."""
    with torch.no_grad():
        logits = reference_logits(model, samples).double().log_softmax(-1)
    found, start = [], 0
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids[1:]).long()[:, None]
        of_sample = logits[start : start + len(ids)].gather(-1, ids)[:, 0].numpy()
        found.append(np.append(0.0, of_sample))
        start += len(sample.token_ids)
    return found
