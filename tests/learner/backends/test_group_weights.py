"""The importance weight of a group weighs every term of its loss, whichever backend trains on it."""

from dataclasses import replace

import numpy as np
import pytest

from learner.algorithms.aggregation import aggregated
from learner.algorithms.losses.objective import Objective
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.megatron.trainer import Trainer
from learner.config.algorithm import SequenceMean, TokenMean
from learner.config.frozen_policies import ReferenceConfig
from learner.config.loss import KLCovLoss, RegressionLoss, ReinforceLoss
from learner.config.optimizer import OptimizerConfig
from learner.data.packing import Sample, pack
from tests.learner.tiny import hf_state, random_samples, tiny_model

LENGTHS = [5, 17, 9, 12]
OBJECTIVES = {
    "reinforce, KL, entropy": (Objective(ReinforceLoss(), reference=ReferenceConfig(kl_coef=0.3)), 0.2),
    "kl_cov": (Objective(KLCovLoss()), 0.1),
    "regression": (Objective(RegressionLoss(), reference=ReferenceConfig(kl_coef=0.3)), 0.0),
}
BACKENDS = {"megatron": Trainer, "fsdp": FsdpTrainer}
CASES = [
    *(("megatron", name) for name in OBJECTIVES),
    ("fsdp", "reinforce, KL, entropy"),
    *(pytest.param("fsdp", name, marks=pytest.mark.nightly) for name in ("kl_cov", "regression")),
]
"""Backends and objectives. The terms of a loss are the same code for both backends."""


def samples_of() -> list[Sample]:
    """Return samples of two groups; the second one's have the advantage 0, which leaves the other terms."""
    draw = np.random.default_rng(5)
    return [
        replace(
            sample.with_streams(
                advantages=sample.streams["advantages"] if n < 2 else 0.0,
                reference_logprobs=draw.normal(-3, 1, len(sample.token_ids)).astype(np.float32),
                proximal_logprobs=np.zeros(len(sample.token_ids), np.float32),
                picked_by_covariance=(draw.random(len(sample.token_ids)) < 0.5).astype(np.float32),
            ),
            group=n // 2,
        )
        for n, sample in enumerate(random_samples(LENGTHS, seed=3))
    ]


def trained(backend: str, name: str, samples: list[Sample]) -> tuple[float, float]:
    """Return loss and gradient norm of one update on these samples."""
    objective, entropy_coef = OBJECTIVES[name]
    model = tiny_model()
    trainer = BACKENDS[backend](model.config, hf_state(model), OptimizerConfig(lr=1e-2))
    found = trainer.train_step(
        pack(samples, 30), replace(objective, entropy_coef=entropy_coef), policy_version=3
    )
    return found.loss, found.grad_norm


def with_denominators(samples: list[Sample]) -> list[Sample]:
    return [replace(sample, denominator=sample.denominator or sample.trained_tokens) for sample in samples]


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize(("backend", "name"), CASES)
def test_a_group_of_weight_two_is_that_group_twice_in_the_sum(backend, name):
    samples = with_denominators(samples_of())
    plain = trained(backend, name, samples)
    for chosen in (0, 1):
        weighed = [s.with_streams(group_weights=2.0) if s.group == chosen else s for s in samples]
        twice = samples + [replace(s, denominator=0.0) for s in samples if s.group == chosen]
        found, expected = trained(backend, name, weighed), trained(backend, name, twice)
        assert found == pytest.approx(expected, rel=1e-5)
        assert found != pytest.approx(plain, rel=1e-3)


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize(("backend", "name"), CASES)
def test_a_group_of_weight_zero_has_no_gradient_but_its_part_of_the_denominator(backend, name):
    samples = with_denominators(samples_of())
    nothing = [s.with_streams(group_weights=0.0) for s in samples]
    assert trained(backend, name, nothing) == (0.0, 0.0)
    without = [s.with_streams(group_weights=0.0) if s.group == 1 else s for s in samples]
    alone = [s for s in samples if s.group == 0]
    whole = sum(s.denominator for s in samples)
    share = [replace(s, denominator=whole / len(alone)) for s in alone]
    assert trained(backend, name, without) == pytest.approx(trained(backend, name, share), rel=1e-5)


def test_an_aggregation_weighs_tokens_beside_the_weight_of_their_group():
    samples = [s.with_streams(group_weights=3.0) for s in samples_of()]
    for sample, found in zip(samples, aggregated(samples, SequenceMean()), strict=True):
        assert found.streams["loss_weights"] == pytest.approx(1 / sample.trained_tokens)
        assert found.denominator == 1.0
        assert found.streams["group_weights"] == 3.0
    assert aggregated(samples, TokenMean()) == samples
