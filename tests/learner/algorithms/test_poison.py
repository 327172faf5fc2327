"""No finite log-prob, however impossible, makes a loss, a gradient or a diagnostic infinite or NaN."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from learner.algorithms.diagnostics import off_policy_diagnostics, off_policy_sums
from learner.algorithms.losses.kl import kl_estimates
from learner.algorithms.losses.objective import Objective, token_losses
from learner.algorithms.tokens import TrainedTokens
from learner.config.frozen_policies import ReferenceConfig
from learner.config.learner import LearnerConfig
from learner.config.loss import SFTLoss
from learner.data.packing import pack
from tests.learner.algorithms.loss_inputs import leaf, tokens_of
from tests.learner.choices import LOSSES, REJECTIONS, WEIGHING
from tests.learner.tiny import random_samples

EXTREMES = (-1e30, -1e4, -400.0, -99.0, -21.0, -20.0, -1.0, -1e-7, 0.0)
PROXIMAL = {"type": "ppo_clip", "centre": "proximal"}
LOSS_SETTINGS = [
    *({"type": type_} for type_ in LOSSES),
    {"type": "ppo_clip", "dual_clip": 3.0},
    {"type": "vespo", "decay": 0.0, "power_negative": 0.0},
    *(PROXIMAL | {"proximal": source} for source in ("recomputed", "first_pass", "interpolated")),
]
CORRECTION_SETTINGS = [
    {"type": type_, "bound": bound} | over
    for type_ in WEIGHING
    for bound in ("truncate", "clip", "mask")
    for over in ([{}] if type_ == "token_tis" else [{"over": "product"}, {"over": "mean"}])
]
REJECTION_SETTINGS = [{"type": type_} for type_ in (*REJECTIONS, "none")]
ALL_AT_ONCE = {str(n): settings for n, settings in enumerate(REJECTION_SETTINGS)}
REFERENCES = [
    ReferenceConfig(kl_coef=0.1, kl_estimator=estimator, kl_in=where, kl_unbiased=unbiased)
    for estimator in ("k1", "k2", "k3", "low_var_kl")
    for where, unbiased in (("loss", False), ("loss", True), ("advantage", False))
]


def objectives() -> dict[str, Objective]:
    """Every loss with every rejection, every correction with the losses that take one, every estimator."""
    wanted = [
        *(
            {"loss": loss, "rejection": rejection}
            for loss, rejection in product(LOSS_SETTINGS, REJECTION_SETTINGS)
        ),
        *(
            {"correction": correction, "loss": loss}
            for correction in CORRECTION_SETTINGS
            for loss in ({"type": "reinforce"}, PROXIMAL)
        ),
        *({"reference": reference, "entropy_coef": 0.1} for reference in REFERENCES),
        *({"loss": loss, "rejections": ALL_AT_ONCE} for loss in LOSS_SETTINGS),
    ]
    found = {str(settings): Objective.of(LearnerConfig(**settings)) for settings in wanted}
    return found | {"sft": Objective(SFTLoss())}


OBJECTIVES = objectives()


def assert_finite(objective: Objective, name: str, now: list[float], streams: dict[str, list[float]]) -> None:
    sequence = tuple(2 * (i // 3) + (i % 3 == 2) for i in range(len(now)))  # 0, 0, 1, 2, 2, 3 and so on
    tokens = tokens_of(leaf(*now), sequence=sequence, **streams)
    tokens = replace(tokens, policy_version=3)
    losses, sums = token_losses(objective, tokens)
    gradients = torch.autograd.grad(losses.sum(), (tokens.logprobs, tokens.entropy), allow_unused=True)
    sums |= off_policy_sums(tokens)
    numbers = [losses, *(g for g in gradients if g is not None), *sums.values()]
    for number in numbers:
        assert number.isfinite().all(), (name, now, streams)
    figures = off_policy_diagnostics({key: value.item() for key, value in sums.items()})
    assert np.isfinite(list(figures.values())).all(), (name, figures)


def test_every_objective_is_finite_at_the_extremes():
    """Each case is a sequence of two tokens and one of one, all of them in one micro-batch."""
    cases = list(product((-1e30, -99.0, 0.0), EXTREMES, (1.0, -1.0)))
    now = [x for now, _, _ in cases for x in (now, -1.0, now)]
    streams = {
        "behaviour_logprobs": [x for _, then, _ in cases for x in (then, -1.0, then)],
        "proximal_logprobs": [x for _, then, _ in cases for x in (then, -1.0, -400.0)],
        "reference_logprobs": [x for _, then, _ in cases for x in (then, -1.0, -1e30)],
        "advantages": [x for _, _, advantage in cases for x in (advantage, advantage, -advantage)],
        "policy_versions": [3, 1, 2] * len(cases),
        "picked_by_covariance": [1.0, 0.0, 0.0] * len(cases),
        "beyond_second_moment": [0.0, 1.0, 0.0] * len(cases),
    }
    for name, objective in OBJECTIVES.items():
        assert_finite(objective, name, now, streams)


WITHOUT_DECAY = str(
    {"loss": {"type": "vespo", "decay": 0.0, "power_negative": 0.0}, "rejection": {"type": "none"}}
)


@settings(max_examples=100)
@example(WITHOUT_DECAY, [-1e30, -1e4, *10 * [-1e30]], [100.0, 0.0, 0.0], 6 * [0.0])
@given(
    st.sampled_from(sorted(OBJECTIVES)),
    st.lists(st.sampled_from(EXTREMES) | st.floats(-1e4, 0.0, width=32), min_size=12, max_size=12),
    st.lists(st.floats(-100.0, 100.0, width=32), min_size=3, max_size=3),
    st.lists(st.sampled_from((0.0, 1.0)), min_size=6, max_size=6),
)
def test_every_objective_is_finite_for_any_log_probs(name, logprobs, advantages, picked):
    streams = {
        "behaviour_logprobs": logprobs[3:6],
        "proximal_logprobs": logprobs[6:9],
        "reference_logprobs": logprobs[9:12],
        "advantages": advantages,
        "policy_versions": [3, 1, 2],
        "picked_by_covariance": picked[:3],
        "beyond_second_moment": picked[3:],
    }
    assert_finite(OBJECTIVES[name], name, logprobs[:3], streams)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "low_var_kl"])
def test_kl_estimates_are_finite_with_a_finite_slope(estimator):
    for now, reference in product(EXTREMES, EXTREMES):
        logprobs = leaf(now)
        found = kl_estimates(
            logprobs, torch.tensor([reference]), estimator=estimator, importance_ratio=torch.tensor([5e8])
        )
        found.sum().backward()
        assert found.isfinite().all()
        assert logprobs.grad.isfinite().all(), (now, reference)


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_lies_outside_of_the_mask_reaches_nothing(poison):
    clean = random_samples([9, 14, 3])

    def poisoned(sample):
        mask, streams = sample.loss_mask, {}
        for name in ("behaviour_logprobs", "proximal_logprobs", "reference_logprobs", "advantages"):
            values = np.broadcast_to(sample.streams.get(name, -1.0), len(mask))
            streams[name] = np.where(mask, values, poison).astype(np.float32)
        return sample.with_streams(**streams)

    [batch] = pack([poisoned(sample) for sample in clean], 100)
    known = TrainedTokens.of(batch, policy_version=3)
    count = len(batch.trained)
    for name, objective in OBJECTIVES.items():
        if objective.selected:
            continue
        logprobs = torch.full((count,), -1.5, requires_grad=True)
        tokens = known.with_logprobs(logprobs, torch.ones(count, requires_grad=True))
        losses, sums = token_losses(objective, tokens)
        [gradient] = torch.autograd.grad(losses.sum(), logprobs)
        for values in (losses, gradient, *sums.values(), *off_policy_sums(tokens).values()):
            assert values.isfinite().all(), name
