"""A step of several updates on one batch."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from bus.errors import ConfigError
from learner.algorithms.advantages.step_advantages import estimate_advantages
from learner.backends.megatron.trainer import Trainer
from learner.config.batch import BatchConfig
from learner.config.learner import LearnerConfig
from learner.config.optimizer import OptimizerConfig
from learner.data.batches import make_step_batch, recorded_samples
from learner.data.packing import pack
from learner.step.rl_step import train_on
from tests.learner.tiny import TIS, tiny_model
from tests.learner.world.ranks_worker import group


def trainer_of() -> Trainer:
    model = tiny_model()
    return Trainer(model.config, model.state_dict(), OptimizerConfig(lr=1e-3, warmup_steps=2))


def test_a_step_of_two_updates_is_both_of_them_one_after_the_other():
    groups, learner = [group(1), group(2)], LearnerConfig(batch=BatchConfig(updates=2))
    together = trainer_of()
    batch, result = train_on(together, groups, [1.0, 1.0], learner, step=1, policy_version=4)
    apart = trainer_of()
    advantages = estimate_advantages(learner.advantage, groups)
    samples = make_step_batch(groups, recorded_samples(groups), advantages, policy_version=4).samples
    one, two = (
        apart.train_step(pack(part, 1000), TIS, policy_version=4)
        for part in ([samples[1], samples[2]], [samples[0], samples[3]])  # leases 1 and 2, two siblings each
    )
    assert all(torch.equal(weight, apart.export()[name]) for name, weight in together.export().items())
    assert batch.trajectories == 4
    assert result.tokens == one.tokens + two.tokens
    assert result.loss == pytest.approx((one.loss * one.tokens + two.loss * two.tokens) / result.tokens)
    assert result.grad_norm == max(one.grad_norm, two.grad_norm)
    assert (result.lr, result.skipped) == (two.lr, False)
    entropies = [(u.diagnostics["entropy_nats"], u.tokens) for u in (one, two)]
    expected = sum(entropy * tokens for entropy, tokens in entropies) / result.tokens
    assert result.diagnostics["entropy_nats"] == pytest.approx(expected)


def test_a_step_one_of_whose_updates_was_not_finite_says_so_whichever_it_was():
    learner = LearnerConfig(batch=BatchConfig(updates=2))
    for bad in range(2):
        of_bad = group(1)
        poisoned = next(n for n, one in enumerate(of_bad) if (one.lease_id + one.sample) % 2 == bad)
        broken = np.full_like(of_bad[poisoned].behaviour_logprobs, math.nan)
        of_bad[poisoned] = replace(of_bad[poisoned], behaviour_logprobs=broken)
        _, result = train_on(trainer_of(), [of_bad, group(2)], [1.0, 1.0], learner, step=1, policy_version=4)
        assert result.skipped
        assert math.isnan(result.grad_norm)


def test_a_trajectory_that_only_a_later_update_trains_is_refused_before_the_first():
    trainer, groups = trainer_of(), [group(1), group(2)]
    longest = max((one for each in groups for one in each), key=lambda one: len(one.token_ids))
    assert (longest.lease_id + longest.sample) % 2 == 1
    batch = BatchConfig(updates=2, oversized="refuse", tokens_per_micro_batch=len(longest.token_ids) - 1)
    with pytest.raises(ConfigError, match=f"{longest.trajectory_id} has {len(longest.token_ids)} tokens"):
        train_on(trainer, groups, [1.0, 1.0], LearnerConfig(batch=batch), step=1, policy_version=4)
    assert trainer.counts.steps_done == 0
