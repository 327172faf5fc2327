"""Answers of forced length: the profiles, and that engines keep to them."""

import asyncio
from itertools import pairwise
from statistics import median

import pytest
from pydantic import ValidationError

from actors.engines.base import GenerationRequest, Sampling
from actors.engines.sglang.client.request_bodies import request_body
from actors.environments.base import Environment
from actors.environments.build import build_environment
from actors.environments.length_profile import LengthProfile, length_at
from actors.episodes.task import Task
from actors.policy.policy import Policy
from actors.settings.length_profile import LengthProfileConfig, LogNormalLengths, RecordedLengths

SHARES = [(n + 0.5) / 1000 for n in range(1000)]


def drawn(config, count=4000):
    environment = LengthProfile(LengthProfileConfig(lengths=config))
    return [environment.length(f"g{n // 8:08d}.{n % 8}") for n in range(count)]


def test_a_log_normal_profile_has_its_median_its_tail_and_its_end():
    lengths = drawn(LogNormalLengths(median=200, sigma=1.0, longest=2000))
    assert median(lengths) == pytest.approx(200, rel=0.1)
    assert max(lengths) == 2000
    assert sum(length == 2000 for length in lengths) / len(lengths) == pytest.approx(0.0107, abs=0.006)


def test_a_recorded_profile_fills_its_bins_as_counted():
    lengths = drawn(RecordedLengths(upper=(10, 20, 100), counts=(1, 0, 3)))
    short = [length for length in lengths if length <= 10]
    assert len(short) / len(lengths) == pytest.approx(0.25, abs=0.03)
    assert (min(lengths), max(short), max(lengths)) == (1, 10, 100)
    assert not [length for length in lengths if 10 < length <= 20]


@pytest.mark.parametrize(
    "profile",
    [
        LogNormalLengths(median=3, sigma=2.0, longest=50),
        LogNormalLengths(median=7, sigma=0.0),
        RecordedLengths(upper=(1, 2, 9), counts=(0.5, 0, 0.5)),
    ],
)
def test_lengths_rise_with_the_share_and_are_never_empty(profile):
    lengths = [length_at(profile, share) for share in SHARES]
    assert all(one <= other for one, other in pairwise(lengths))
    assert 1 <= lengths[0] <= lengths[-1] <= profile.longest


def test_a_sample_has_the_same_length_and_reward_whenever_it_is_drawn_and_its_siblings_others():
    one, again = drawn(LogNormalLengths(), 64), drawn(LogNormalLengths(), 64)
    assert one == again
    assert len(set(one)) > 32


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"upper": (5, 5), "counts": (1, 1)}, "must rise"),
        ({"upper": (0, 5), "counts": (1, 1)}, "must rise from 1"),
        ({"upper": (5,), "counts": (1, 1)}, "give as many"),
        ({"upper": (5, 6), "counts": (0, 0)}, "not all of them 0"),
    ],
)
def test_what_is_no_histogram_is_refused(settings, said):
    with pytest.raises(ValidationError, match=said):
        RecordedLengths(**settings)


async def test_an_engine_answers_in_exactly_so_many_tokens_and_a_group_has_variance(serve, tokenizer):
    config = LengthProfileConfig(lengths=LogNormalLengths(median=12, sigma=1.0, longest=60))
    environment: Environment = build_environment(config)
    every_token = tuple(range(40))  # the first of them would end an answer, if any could
    async with serve() as engine:
        policy = Policy(engine, tokenizer, Sampling(max_new_tokens=60, stop_token_ids=every_token))
        tasks = [Task(task_id=f"g{n:08d}.0", prompt="123") for n in range(12)]
        episodes = await asyncio.gather(*(environment.run(task, policy) for task in tasks))
    expected = [LengthProfile(config).length(task.task_id) for task in tasks]
    assert [int(e.trajectories[0].loss_mask.sum()) for e in episodes] == expected
    assert len(set(expected)) > 4
    rewards = [episode.trajectories[0].reward for episode in episodes]
    assert len(set(rewards)) == len(rewards)
    assert all(0 < reward < 1 for reward in rewards)
    assert policy.sampling.stop_token_ids == every_token, "the others' policy is as it was"


def test_sglang_is_told_that_no_token_ends_an_answer():
    request = GenerationRequest("r", [1, 2], Sampling(max_new_tokens=33))
    sampling = request_body(request, rid="r", salt="0")["sampling_params"]
    assert (sampling["max_new_tokens"], sampling["stop_token_ids"]) == (33, None)
    assert sampling["ignore_eos"]
