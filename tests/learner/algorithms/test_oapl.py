"""OAPL: the advantage by hand, and its regression against the equation in float64."""

from dataclasses import replace
from math import exp, log

import numpy as np
import pytest
import torch

from learner.algorithms.advantages.group_baselines import less_optimal_value
from learner.algorithms.advantages.step_advantages import estimate_advantages
from learner.algorithms.aggregation import aggregated
from learner.algorithms.losses.objective import Objective, token_losses
from learner.algorithms.tokens import TrainedTokens
from learner.config.advantage import OAPLAdvantage
from learner.config.algorithm import ConstantDenominator
from learner.config.loss import RegressionLoss
from learner.data.batches import make_step_batch, recorded_samples
from learner.data.packing import micro_batch_of
from tests.factories import make_trajectory

REWARDS = (0.0, 1.0, 0.0, 2.0)
GROUP = [make_trajectory(0, n, group_size=4, tokens=6 + n, reward=r) for n, r in enumerate(REWARDS)]


@pytest.mark.parametrize("weight", [0.1, 1.0, 3.0])
def test_the_baseline_is_the_optimal_value(weight):
    value = weight * log(sum(exp(r / weight) for r in REWARDS) / 4)
    [found] = estimate_advantages(OAPLAdvantage(value_kl_weight=weight), [GROUP])
    assert found == pytest.approx([r - value for r in REWARDS], rel=1e-12)


def test_the_value_lies_between_the_mean_and_the_best_and_never_overflows():
    rewards = np.array(REWARDS)
    assert less_optimal_value(rewards, value_kl_weight=1e4) == pytest.approx(rewards - 0.75, abs=1e-4)
    assert less_optimal_value(1e6 * rewards, value_kl_weight=1e-3) == pytest.approx(
        1e6 * (rewards - 2.0), abs=0.01
    )
    assert less_optimal_value(np.full(3, 5.0), value_kl_weight=0.5) == pytest.approx([0.0] * 3)


def test_with_the_regression_the_gradient_is_that_of_the_squared_error_over_2_b():
    b, config = 0.3, OAPLAdvantage(value_kl_weight=0.7)
    advantages = estimate_advantages(config, [GROUP])
    batch = make_step_batch([GROUP], recorded_samples([GROUP]), advantages, policy_version=0)
    packed = micro_batch_of(aggregated(batch.samples, ConstantDenominator(tokens=1)))
    known = TrainedTokens.of(packed)
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(len(known.labels), generator=draw)
    logprobs = (known.streams["behaviour_logprobs"] + 0.3 * noise).requires_grad_()
    objective = Objective(loss=RegressionLoss(kl_weight=b))
    losses, _ = token_losses(objective, known.with_logprobs(logprobs, torch.zeros_like(logprobs)))
    [found] = torch.autograd.grad(losses.sum() / packed.denominator, logprobs)
    exact = logprobs.detach().double().requires_grad_()
    ratio = torch.zeros(4, dtype=torch.float64).index_add(
        0, known.sequence, exact - known.streams["behaviour_logprobs"].double()
    )
    error = (b * ratio - torch.tensor(advantages[0], dtype=torch.float64)).square().mean()
    [expected] = torch.autograd.grad(error / (2 * b), exact)
    assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-7)


def test_agents_are_compared_among_themselves():
    other = [replace(t, agent="judge", reward=9.0) for t in GROUP]
    [found] = estimate_advantages(OAPLAdvantage(), [[*GROUP, *other]])
    assert found[:4] == pytest.approx(estimate_advantages(OAPLAdvantage(), [GROUP])[0])
    assert found[4:] == pytest.approx([0.0] * 4)
