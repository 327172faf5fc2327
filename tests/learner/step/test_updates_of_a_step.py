"""Several updates on one batch: what their figures say together."""

from dataclasses import replace

import numpy as np
import pytest

from learner.backends.megatron.trainer import Trainer
from learner.config.batch import BatchConfig
from learner.config.learner import LearnerConfig
from learner.config.optimizer import OptimizerConfig
from learner.data.batches import recorded_samples
from learner.logprobs.logprobs import score
from learner.step.rl_step import train_on
from tests.learner.tiny import hf_state, tiny_model
from tests.learner.world.ranks_worker import group

VERSION = 4


@pytest.mark.parametrize("updates", [1, 2])
def test_mismatch_is_that_of_the_weights_which_sampled_whatever_later_updates_change(updates):
    policy = tiny_model()
    trainer = Trainer(policy.config, hf_state(policy), OptimizerConfig(lr=1e-2))
    groups = [group(1), group(2)]
    scored = iter(score(trainer, recorded_samples(groups), tokens_per_micro_batch=1000))
    groups = [
        [
            replace(
                trajectory,
                behaviour_logprobs=np.nan_to_num(next(scored).logprobs),
                policy_versions=np.where(trajectory.policy_versions < 0, -1, VERSION).astype(np.int32),
            )
            for trajectory in of_prompt
        ]
        for of_prompt in groups
    ]
    learner = LearnerConfig(batch=BatchConfig(updates=updates))
    _, result = train_on(trainer, groups, [1.0, 1.0], learner, step=1, policy_version=VERSION)
    assert result.diagnostics["mismatch_nats"] < 1e-5
    assert result.diagnostics["bit_equal_fraction"] > 0.5, "the second update's tokens do not count"
    assert (result.diagnostics["k3_nats"] > 1e-4) == (updates > 1)  # the second one has drifted
