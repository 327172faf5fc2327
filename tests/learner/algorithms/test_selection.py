"""Tokens that are picked over a whole update, by hand and whatever the ranks."""

from dataclasses import replace
from math import log

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithms.selection import clip_cov, kl_cov, second_moment, with_selections
from learner.config.correction import SecondMoment
from learner.config.learner import LearnerConfig
from learner.config.loss import ClipCovLoss, KLCovLoss
from tests.learner.tiny import random_samples

NOTHING = np.zeros(0)


def beyond(log_ratios: list[float], bound: float) -> list[bool]:
    found = np.array(log_ratios, np.float64)
    return second_moment(found, NOTHING, NOTHING, NOTHING, largest_moment=bound).tolist()


def test_the_second_moment_by_hand():
    # squares 0.01, 0.04, 0.09 and 1: means of the smallest are 0.01, 0.025, 0.14 / 3 and 0.285
    log_ratios = [0.1, -1.0, 0.2, -0.3]
    assert beyond(log_ratios, 0.3) == [False] * 4
    assert beyond(log_ratios, 0.2) == [False, True, False, False]
    assert beyond(log_ratios, 0.04) == [False, True, False, True]
    assert beyond(log_ratios, 0.005) == [True] * 4


def test_a_second_moment_at_the_bound_is_within_it():
    assert beyond([0.5, -0.5], 0.25) == [False, False]


def test_on_policy_nothing_is_beyond_the_second_moment():
    assert beyond([0.0] * 5, 0.04) == [False] * 5


def test_equal_log_ratios_are_picked_together_whatever_their_order():
    assert beyond([0.1, 0.5, -0.5, 0.5], 0.1) == [False, True, True, True]  # the mean with one 0.5 is 0.13


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=30), st.floats(1e-6, 10.0))
def test_what_is_left_has_a_second_moment_within_the_bound_and_no_more_could_stay(log_ratios, bound):
    squares = np.square(np.clip(log_ratios, -1e4, 1e4))
    picked = np.array(beyond(log_ratios, bound))
    left = squares[~picked]
    assert left.size == 0 or left.mean() <= bound * (1 + 1e-9)
    if picked.any():
        nearest = squares[picked].min()
        assert left.size == 0 or nearest > left.max()
        assert np.append(left, squares[picked & (squares == nearest)]).mean() > bound * (1 - 1e-9)


def test_covariances_by_hand():
    # log-probs around their mean: 2, 0, -2; advantages around theirs: 1, 1, -2; the products: 2, 0, 4
    logprobs, advantages, lot = np.array([-1.0, -3, -5]), np.array([2.0, 2, -1]), np.array([0.3, 0.2, 0.1])

    def kl(fraction: float) -> list[bool]:
        return kl_cov(NOTHING, logprobs, advantages, lot, picked_fraction=fraction).tolist()

    assert kl(0.01) == [False, False, True]  # one at least
    assert kl(0.7) == [True, False, True]

    def clip(low: float, high: float, fraction: float) -> list[bool]:
        settings = {"lowest_covariance": low, "highest_covariance": high, "picked_fraction": fraction}
        return clip_cov(NOTHING, logprobs, advantages, lot, **settings).tolist()

    assert clip(1.0, 5.0, 0.01) == [False, False, True]  # of two in the range the one with the smaller lot
    assert clip(1.0, 5.0, 1.0) == [True, False, True]
    assert clip(1.0, 3.0, 1.0) == [True, False, False]
    assert clip(10.0, 20.0, 1.0) == [False] * 3


def scored_samples(seed: int = 0):
    """Samples with log-probs before the step; NaN where nothing is trained, as a pass leaves them."""
    draw = np.random.default_rng(seed)
    samples = random_samples([7, 12, 3, 20], seed=seed)
    return [
        sample.with_streams(
            proximal_logprobs=np.where(
                sample.loss_mask, sample.streams["behaviour_logprobs"] + draw.normal(0, 0.3, n), np.nan
            ).astype(np.float32)
        )
        for sample in samples
        for n in [len(sample.token_ids)]
    ]


LEARNERS = {
    "second moment": LearnerConfig(rejection=SecondMoment(largest_moment=0.05)),
    "kl-cov": LearnerConfig(loss=KLCovLoss(picked_fraction=0.2)),
    "clip-cov": LearnerConfig(
        loss=ClipCovLoss(picked_fraction=0.2, lowest_covariance=-1.0), rejection=SecondMoment()
    ),
}


@pytest.mark.parametrize("name", LEARNERS)
def test_samples_get_their_own_marks_whatever_their_order(name):
    samples = scored_samples()
    there = with_selections(samples, LEARNERS[name], dist.group.WORLD)
    back = with_selections(samples[::-1], LEARNERS[name], dist.group.WORLD)[::-1]
    marks = 0.0
    for sample, other in zip(there, back, strict=True):
        for stream in set(sample.streams) - set(samples[0].streams):
            assert (sample.streams[stream] == other.streams[stream]).all()
            assert not sample.streams[stream][~sample.loss_mask].any()
            marks += sample.streams[stream].sum()
    assert 0 < marks < sum(2 * sample.trained_tokens for sample in samples)


def test_the_second_moment_of_an_update_bounds_what_is_trained():
    found = with_selections(scored_samples(), LEARNERS["second moment"], dist.group.WORLD)
    squares = [
        np.square(sample.streams["proximal_logprobs"] - sample.streams["behaviour_logprobs"])[1:][
            sample.loss_mask[1:] & (sample.streams["beyond_second_moment"][1:] == 0)
        ]
        for sample in found
    ]
    assert 0.03 < np.concatenate(squares).mean() <= 0.05


def test_an_update_without_samples_or_trained_tokens_picks_nothing():
    learner = LEARNERS["second moment"]
    assert with_selections([], learner, dist.group.WORLD) == []
    [sample] = scored_samples()[:1]
    nothing = replace(sample, loss_mask=np.zeros_like(sample.loss_mask))
    [found] = with_selections([nothing], learner, dist.group.WORLD)
    assert not found.streams["beyond_second_moment"].any()


def test_impossible_log_probs_leave_the_covariances_finite():
    logprobs, advantages = np.array([-1e30, -1.0, -log(2)]), np.array([1.0, -1.0, 0.0])
    assert kl_cov(NOTHING, logprobs, advantages, np.arange(3.0), picked_fraction=0.1).sum() == 1
