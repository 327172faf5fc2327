"""What the learner records of a few trajectories, against transformers."""

import numpy as np
import pytest
import torch

from learner.backends.megatron.trainer import Trainer
from learner.config.diagnostics import RecordedLogprobsConfig
from learner.config.learner import LearnerConfig
from learner.config.optimizer import OptimizerConfig
from learner.logprobs.logprobs import recorded_logprobs
from tests.learner.tiny import tiny_model
from tests.learner.world.ranks_worker import group

GROUPS = [group(1), group(2), group(3)]


def learner_of(every_steps: int, trajectories: int) -> LearnerConfig:
    recorded = RecordedLogprobsConfig(every_steps=every_steps, trajectories=trajectories)
    return LearnerConfig(recorded_logprobs=recorded)


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    model = tiny_model()
    return Trainer(model.config, model.state_dict(), OptimizerConfig(lr=1e-3))


def test_record_has_log_probs_of_the_trained_tokens_as_they_were_sampled(trainer: Trainer):
    found = recorded_logprobs(trainer, GROUPS, learner_of(1, 4), step=1)
    assert len(found) == 4
    model, by_name = tiny_model(), {one.trajectory_id: one for each in GROUPS for one in each}
    for name, logprobs in found.items():
        trajectory = by_name[name]
        ids = torch.from_numpy(trajectory.token_ids).long()
        with torch.no_grad():
            every = (model(ids[None]).logits[0, :-1] / 0.7).log_softmax(-1)  # the turns' temperature
        of_label = every.gather(1, ids[1:, None])[:, 0].numpy()
        np.testing.assert_allclose(logprobs, of_label[trajectory.loss_mask[1:]], atol=1e-5)


def test_only_every_nth_step_has_a_record_beginning_with_the_first(trainer: Trainer):
    recorded = [bool(recorded_logprobs(trainer, GROUPS, learner_of(3, 1), step=n)) for n in range(1, 8)]
    assert recorded == [True, False, False, True, False, False, True]
    assert recorded_logprobs(trainer, GROUPS, learner_of(0, 1), step=1) == {}


def test_which_trajectories_are_recorded_depends_on_neither_order_nor_length(trainer: Trainer):
    chosen = set(recorded_logprobs(trainer, GROUPS, learner_of(1, 3), step=1))
    assert set(recorded_logprobs(trainer, GROUPS[::-1], learner_of(1, 3), step=1)) == chosen
    assert len({name.partition(".")[0] for name in chosen}) > 1  # they are not all of the first group
