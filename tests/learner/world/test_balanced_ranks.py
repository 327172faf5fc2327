"""Which rank gets which groups changes how long each computes, and nothing of what they learn."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from bus.requests import GroupRef
from bus.trajectory import Trajectory
from learner.config.batch import BatchConfig
from learner.config.learner import LearnerConfig
from learner.step.rl_step import train_on
from learner.world.world import cost, divided
from storage.shard.shared_prefixes import different_beginnings
from tests.factories import make_trajectory
from tests.learner.backends.shared_prefixes import behind, trainer_of
from tests.learner.tiny import VOCAB

SIZES = [(200, 15), (8, 204), (10, 200), (190, 17)]
"""Tokens of each group's prompt, and of its two answers: by length alone, the long prompts come together."""
LEARNER = LearnerConfig(batch=BatchConfig(tokens_per_micro_batch=300, share_prefixes=True))


def sized_group(number: int) -> list[Trajectory]:
    """Two siblings of unlike rewards."""
    prompt, answer = SIZES[number]
    siblings = [make_trajectory(number, n, tokens=answer, reward=float(n)) for n in range(2)]
    siblings = [replace(each, token_ids=each.token_ids % VOCAB) for each in siblings]
    return [behind(each, np.arange(prompt, dtype=np.int32) % VOCAB) for each in siblings]


def stored(number: int) -> GroupRef:
    """What storage says of a group."""
    texts = [trajectory.token_ids for trajectory in sized_group(number)]
    count = sum(map(len, texts))
    return GroupRef(lease_id=number, shard=0, tokens=count, computed_tokens=different_beginnings(texts))


def trained(batch: BatchConfig) -> tuple[str, list[float], int]:
    """Take a step on this rank's share by the balance of `batch`.

    Returns the batch's digest, numbers of the step that are those of all ranks, and how many tokens this rank
    computed."""
    trainer, computed = trainer_of(), []
    ranks = trainer.data_parallel_group
    refs = [stored(n) for n in range(len(SIZES))]
    shares = divided(refs, ranks.size(), lambda ref: cost(ref, batch, trainer.hf_config, 2))
    groups = [sized_group(ref.lease_id) for ref in shares[ranks.rank()]]
    train_step = trainer.train_step

    def counted(batches, *arguments, **named):
        computed.extend(each.computed_tokens for each in batches)
        return train_step(batches, *arguments, **named)

    trainer.train_step = counted
    found, result = train_on(trainer, groups, [1.0] * len(groups), LEARNER, step=1, policy_version=1)
    weights = torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()]).double()
    return found.xxh3(), [result.loss, result.grad_norm, float(weights.norm())], sum(computed)


@pytest.mark.slow
def test_ranks_balanced_by_computed_tokens_end_sooner_and_train_the_same(worlds):
    balanced = worlds.run(2, trained, LEARNER.batch)
    by_length = worlds.run(2, trained, BatchConfig(share_prefixes=False))
    alone = trained(LEARNER.batch)
    for digest, numbers, _ in (*balanced, *by_length):
        assert digest == alone[0]
        assert numbers == pytest.approx(alone[1], rel=1e-5)
    worst, worst_by_length = (max(found[2] for found in each) for each in (balanced, by_length))
    assert worst < 0.8 * worst_by_length
    assert worst < 1.05 * alone[2] / 2
