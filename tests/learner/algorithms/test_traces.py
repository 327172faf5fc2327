"""GAE and V-trace against numbers worked out by hand, sums written as in the papers, and their limits."""

from math import prod

import numpy as np
import pytest

from bus.trajectory import LARGEST_LOGPROB, LARGEST_REWARD, SMALLEST_LOGPROB
from learner.algorithms.advantages.gae import gae, vtrace


def drawn(n: int = 9, seed: int = 0):
    draw = np.random.default_rng(seed)
    return draw.normal(size=n), draw.normal(size=n), draw.normal(0, 0.7, n)


def test_gae_of_three_actions_by_hand():
    # surprises: 1 + 0.5 * 4 - 2 = 1, 0 + 0.5 * 6 - 4 = -1, 8 + 0 - 6 = 2; each later one counts 0.5 * 0.5
    found = gae(np.array([1.0, 0.0, 8.0]), np.array([2.0, 4.0, 6.0]), discount=0.5, trace_decay=0.5)
    assert found.tolist() == [1 + 0.25 * -0.5, -1 + 0.25 * 2, 2.0]


def test_vtrace_of_three_actions_by_hand():
    targets, advantages = vtrace(
        np.array([1.0, 0.0, 8.0]), np.array([2.0, 4.0, 6.0]), np.log([2.0, 0.5, 4.0]),
        discount=0.5, trace_decay=1.0, rho_bar=3.0, c_bar=1.0,
    )  # fmt: skip
    # weighed surprises 2 * 1, 0.5 * -1, 3 * 2; traces 0.5 * 1, 0.5 * 0.5
    changes = [2 + 0.5 * (-0.5 + 0.25 * 6), -0.5 + 0.25 * 6, 6.0]
    assert targets.tolist() == pytest.approx([2 + changes[0], 4 + changes[1], 6 + changes[2]], rel=1e-15)
    assert advantages.tolist() == pytest.approx([1 + 0.5 * changes[1], -1 + 0.5 * changes[2], 2.0], rel=1e-15)


@pytest.mark.parametrize(("discount", "trace_decay"), [(1.0, 1.0), (0.9, 0.8), (0.7, 0.0)])
def test_gae_is_the_weighed_mean_of_n_step_advantages(discount, trace_decay):
    """arXiv:1506.02438, eq. 11 to 16: (1 - lambda) sum lambda^(k-1) of the k-step advantage, the rest of the
    weight on the whole return."""
    rewards, values, _ = drawn()
    n = len(rewards)
    for t in range(n):
        steps = [
            sum(discount**i * rewards[t + i] for i in range(k))
            + (discount**k * values[t + k] if t + k < n else 0.0)
            - values[t]
            for k in range(1, n - t + 1)
        ]
        mean = sum((1 - trace_decay) * trace_decay**k * step for k, step in enumerate(steps[:-1]))
        expected = mean + trace_decay ** (len(steps) - 1) * steps[-1]
        found = gae(rewards, values, discount=discount, trace_decay=trace_decay)[t]
        assert found == pytest.approx(expected, rel=1e-13, abs=1e-13)


@pytest.mark.parametrize("trace_decay", [1.0, 0.6])
@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 1.0), (1.5, 0.8), (1e9, 1.0)])
def test_vtrace_is_the_sum_of_the_paper(trace_decay, rho_bar, c_bar):
    """arXiv:1802.01561, eq. 1 with c of remark 2; the advantage as the target of a Q value, section 4.2."""
    rewards, values, log_ratios = drawn(seed=1)
    n, discount = len(rewards), 0.9
    ratio = np.exp(log_ratios)
    after = [*values[1:], 0.0]
    targets, advantages = vtrace(
        rewards, values, log_ratios,
        discount=discount, trace_decay=trace_decay, rho_bar=rho_bar, c_bar=c_bar,
    )  # fmt: skip
    expected = [
        values[s]
        + sum(
            discount ** (t - s)
            * prod(trace_decay * min(c_bar, ratio[i]) for i in range(s, t))
            * min(rho_bar, ratio[t])
            * (rewards[t] + discount * after[t] - values[t])
            for t in range(s, n)
        )
        for s in range(n)
    ]
    np.testing.assert_allclose(targets, expected, rtol=1e-13)
    later = [
        trace_decay * v + (1 - trace_decay) * w for v, w in zip([*expected[1:], 0.0], after, strict=True)
    ]
    np.testing.assert_allclose(advantages, rewards + discount * np.array(later) - values, rtol=1e-12)


def test_without_values_and_decay_advantages_are_the_returns_of_reinforce():
    rewards, values, _ = drawn()
    found = gae(rewards, np.zeros_like(values), discount=1.0, trace_decay=1.0)
    np.testing.assert_allclose(found, np.cumsum(rewards[::-1])[::-1], rtol=1e-14)


def test_on_policy_vtrace_has_the_returns_for_targets_and_agrees_with_gae():
    rewards, values, _ = drawn()
    same = np.zeros_like(values)
    targets, _ = vtrace(rewards, values, same, discount=1.0, trace_decay=1.0, rho_bar=1.0, c_bar=1.0)
    np.testing.assert_allclose(targets, np.cumsum(rewards[::-1])[::-1], rtol=1e-13)
    targets, advantages = vtrace(rewards, values, same, discount=0.9, trace_decay=0.7, rho_bar=1.0, c_bar=1.0)
    expected = gae(rewards, values, discount=0.9, trace_decay=0.7)
    np.testing.assert_allclose(advantages, expected, rtol=1e-14)
    np.testing.assert_allclose(targets, values + expected, rtol=1e-14)


def test_a_trajectory_of_no_action_has_no_credit():
    nothing = np.zeros(0)
    assert gae(nothing, nothing, discount=0.9, trace_decay=0.9).shape == (0,)
    found = vtrace(nothing, nothing, nothing, discount=1, trace_decay=1, rho_bar=1, c_bar=1)
    assert [each.shape for each in found] == [(0,), (0,)]


@pytest.mark.parametrize("rho_bar", [1.0, 1e30])
def test_vtrace_is_finite_for_any_accepted_log_probs(rho_bar):
    worst = LARGEST_LOGPROB - SMALLEST_LOGPROB
    log_ratios = np.resize([worst, -worst, worst, 0.0], 20_000) * 1e3  # of turns of a thousand tokens
    rewards = np.resize([1e30, -1e30, 0.0], 20_000)
    for found in vtrace(
        rewards, rewards[::-1], log_ratios, discount=1.0, trace_decay=1.0, rho_bar=rho_bar, c_bar=1.0
    ):
        assert np.isfinite(found).all()
    assert LARGEST_REWARD > 1e30
