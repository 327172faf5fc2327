"""What the embedded engine draws with tokens cut off is on-policy for the learner: every ratio is 1."""

from dataclasses import replace

import numpy as np
import pytest

from actors.engines.base import Sampling
from bus.trajectory import Trajectory
from learner.algorithms.losses.objective import Objective
from learner.backends.megatron.trainer import Trainer
from learner.config.batch import BatchConfig
from learner.config.learner import LearnerConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.data.batches import recorded_samples
from learner.data.packing import pack
from learner.logprobs.logprobs import score
from learner.metrics.step_metrics import batch_values
from learner.step.rl_step import train_on
from tests.learner.division import divide_world
from tests.learner.stored_rollouts import stored_rollouts
from tests.learner.tiny import hf_state, tiny_model

CUTS = (
    Sampling(temperature=0.8, top_p=0.7, keep_masks=True, max_new_tokens=12),
    Sampling(top_k=3, keep_masks=True, max_new_tokens=9),
    Sampling(temperature=1.3, min_p=0.2, top_k=20, keep_masks=True, max_new_tokens=15),
    Sampling(max_new_tokens=7),
)


@pytest.fixture(scope="module")
def model():
    return tiny_model(seed=0)


@pytest.fixture(scope="module")
def stored(model, tmp_path_factory) -> list[Trajectory]:
    return stored_rollouts(model, tmp_path_factory.mktemp("store"), CUTS, context=5)


def learner_of(model) -> Trainer:
    divide_world(ParallelConfig())
    return Trainer(model.config, hf_state(model), OptimizerConfig(lr=1e-3))


def test_the_learner_gives_every_token_the_log_prob_that_it_was_drawn_with(model, stored):
    trainer = learner_of(model)
    sizes = [t.kept_sets.counts[t.loss_mask] for t in stored]
    assert [size.min() > 0 for size in sizes] == [True, False]  # the last turn cuts nothing off
    assert all(size.max() > 1 for size in sizes)
    samples = recorded_samples([stored])
    for sample, found in zip(samples, score(trainer, samples, tokens_per_micro_batch=64), strict=True):
        behaviour = sample.streams["behaviour_logprobs"][sample.loss_mask]
        np.testing.assert_allclose(found.logprobs[sample.loss_mask], behaviour, atol=1e-5)
    without = [replace(sample, kept=None) for sample in samples]
    for sample, found in zip(without, score(trainer, without, tokens_per_micro_batch=64), strict=True):
        behaviour = sample.streams["behaviour_logprobs"][sample.loss_mask]
        assert (behaviour - found.logprobs[sample.loss_mask]).max() > 0.05


def test_a_step_on_them_is_on_policy(model, stored):
    learner = LearnerConfig(batch=BatchConfig(tokens_per_micro_batch=64))
    batch, result = train_on(learner_of(model), [stored], [1.0], learner, step=1, policy_version=3)
    figures = result.diagnostics
    assert figures["ess_fraction"] == pytest.approx(1.0, abs=1e-6)
    assert figures["importance_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert figures["mismatch_nats"] < 1e-5
    assert batch_values(batch)["rollout/cut_off_fraction"] == 0.0
    plain = [replace(sample, kept=None) for sample in recorded_samples([stored])]
    samples = [sample.with_streams(advantages=1.0) for sample in plain]
    unmasked = learner_of(model).train_step(pack(samples, 64), Objective.of(learner), policy_version=3)
    assert unmasked.diagnostics["mismatch_nats"] > 0.05  # what keep masks are for


def test_the_digest_of_a_batch_depends_on_the_kept_sets(stored):
    [sample, _] = recorded_samples([stored])
    assert sample.xxh3() != replace(sample, kept=None).xxh3()
