"""Rewards with parts, rewards that a prompt chooses, and rewards of whole groups."""

import asyncio

import numpy as np
import pytest
from pydantic import ValidationError

from actors.environments.prompt_choices import refuse_unknown_choices
from actors.rewards.base import LATER, InvalidRewardError, RewardError, Scored
from actors.rewards.scoring.scorers import GroupScorer, RewardChoice, Scorer
from actors.settings.actors import ActorsConfig, SingleTurnConfig
from actors.settings.rewards import RewardConfig
from bus.errors import ConfigError
from bus.messages import Prompt
from tests.actors.rewards.answers import answer

PARTS = {"right": 1, "format": np.float32(0.5)}


async def scored(returned, **weights):
    scorer = Scorer("mine", timeout_s=60, reward=lambda _: returned, weights=weights)
    return await scorer.scored(answer())


@pytest.mark.parametrize(
    ("returned", "weights", "expected"),
    [
        (0.5, {}, Scored(0.5)),
        (0.5, {"right": 2.0}, Scored(0.5)),
        (PARTS, {}, Scored(1.5, {"right": 1.0, "format": 0.5})),
        (PARTS, {"right": 0.75, "format": 0.5}, Scored(1.0, {"right": 1.0, "format": 0.5})),
        (PARTS, {"format": -2.0}, Scored(-1.0, {"right": 1.0, "format": 0.5})),
        (Scored(0.0, {"followed": 0.5}), {}, Scored(0.0, {"followed": 0.5})),
        (Scored(0.0, {"followed": 0.5}), {"followed": 1.0}, Scored(0.5, {"followed": 0.5})),
        (Scored(0.25), {"followed": 1.0}, Scored(0.25)),
    ],
)
async def test_parts_make_the_reward(returned, weights, expected):
    found = await scored(returned, **weights)
    assert found == expected
    assert [type(value) for value in found.components.values()] == [float] * len(expected.components)


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        ({}, "returned {}: a reward is a finite number"),
        ({"right": None}, "in its part 'right', returned None"),
        ({"right": float("nan")}, "in its part 'right', returned nan"),
        ({"right": "1"}, "in its part 'right', returned '1'"),
        ({1: 1.0}, "returned {1: 1.0}"),
        ({"right": 3e38, "more": 3e38}, "returned 6e"),
        (Scored(float("nan")), "returned nan"),
        (Scored(None), "returned None"),
        ([1.0], r"returned \[1.0\]"),
    ],
)
async def test_parts_that_are_no_numbers_are_errors(returned, why):
    with pytest.raises(InvalidRewardError, match=why):
        await scored(returned)


async def test_a_weight_of_a_part_that_is_not_there_is_an_error():
    with pytest.raises(InvalidRewardError, match=r"no part 'rihgt', which reward_weights names: it has"):
        await scored(PARTS, rihgt=1.0)


@pytest.fixture
def own_rewards(tmp_path, monkeypatch):
    (tmp_path / "rewards_to_choose.py").write_text(
        "def length(answer):\n    return len(answer.text)\n"
        "async def halved(answers):\n    return [answer.reward / 2 for answer in answers]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", __import__("sys").path.copy())


@pytest.mark.usefixtures("own_rewards")
async def test_a_prompt_chooses_among_the_rewards_that_the_run_allows():
    config = RewardConfig(reward="exact", rewards=("contains", "rewards_to_choose:length"))
    choice = RewardChoice.from_config(config)
    chosen = [{}, {"reward": "contains"}, {"reward": "rewards_to_choose:length"}, {"reward": "exact"}]
    found = [await choice.scored(answer("it is 42", metadata=metadata)) for metadata in chosen]
    assert found == [Scored(0.0), Scored(1.0), Scored(8.0), Scored(0.0)]
    with pytest.raises(
        InvalidRewardError, match=r"reward 'contain': did you mean 'contains'\? the run allows"
    ):
        await choice.scored(answer(metadata={"reward": "contain"}))
    with pytest.raises(InvalidRewardError, match="choose the reward None"):
        await choice.scored(answer(metadata={"reward": None}))
    await choice.close()


def test_prompts_that_choose_a_reward_which_the_run_does_not_allow_are_refused_before_it_starts():
    config = ActorsConfig(environment=SingleTurnConfig(reward="exact", rewards=("f1",)))
    good = [
        Prompt(content="a", label="x"),
        Prompt(content="b", label="x", metadata={"reward": "f1", "source": "tables"}),
    ]
    refuse_unknown_choices(good, config, where="mine.jsonl")
    bad = [*good, Prompt(content="c", metadata={"reward": "exactt"})]
    with pytest.raises(
        ConfigError,
        match=r"mine.jsonl, prompt 3: its metadata choose the reward 'exactt': did you mean 'exact'\?",
    ):
        refuse_unknown_choices(bad, config, where="mine.jsonl")


def test_every_reward_that_may_be_chosen_is_loaded_at_start_up():
    with pytest.raises(ConfigError, match=r"no reward named 'deepscalr': did you mean 'deepscaler'\?"):
        RewardChoice.from_config(RewardConfig(rewards=("deepscalr",)))
    with pytest.raises(ConfigError, match="no group reward named 'halved'"):
        GroupScorer.from_config(RewardConfig(group_reward="halved"))
    with pytest.raises(ValidationError, match="finite"):
        RewardConfig(reward_weights={"right": float("inf")})


@pytest.mark.usefixtures("own_rewards")
async def test_a_group_reward_sees_all_answers_and_their_own_rewards():
    group = GroupScorer.from_config(RewardConfig(group_reward="rewards_to_choose:halved"))
    assert await group.scored([answer("a", reward=1.0), answer("b", reward=0.5)]) == [
        Scored(0.5),
        Scored(0.25),
    ]
    assert GroupScorer.from_config(RewardConfig()) is None


async def in_group(returned, **settings):
    scorer = GroupScorer("mine", reward=lambda answers: returned, **{"timeout_s": 5, **settings})
    return await scorer.scored([answer("a"), answer("b")])


async def test_a_group_reward_may_return_arrays_and_parts():
    assert await in_group(np.array([1.0, 0.5])) == [Scored(1.0), Scored(0.5)]
    found = await in_group([{"right": 1.0, "brief": 0.5}, 0.25], weights={"right": 2.0})
    assert found == [Scored(2.0, {"right": 1.0, "brief": 0.5}), Scored(0.25)]


@pytest.mark.parametrize(
    ("returned", "error", "why"),
    [
        ([1.0], InvalidRewardError, r"on 2 answers, the first t, returned \[1.0\]: return a list"),
        (1.0, InvalidRewardError, "return a list with a reward for each"),
        (None, InvalidRewardError, "return a list with a reward for each"),
        ({"a": 1.0, "b": 1.0}, InvalidRewardError, "return a list with a reward for each"),
        ([1.0, float("nan")], InvalidRewardError, "returned nan"),
        ([1.0, LATER], RewardError, "have to be known together"),
    ],
)
async def test_a_group_reward_that_returns_something_else_is_an_error(returned, error, why):
    with pytest.raises(error, match=why):
        await in_group(returned)


async def test_a_group_reward_that_raises_or_hangs_is_an_error():
    def wrong(answers):
        raise KeyError("mine")

    async def hang(answers):
        await asyncio.Event().wait()

    with pytest.raises(RewardError, match=r"raised KeyError\('mine'\)"):
        await GroupScorer("mine", timeout_s=60, reward=wrong).scored([answer()])
    with pytest.raises(RewardError, match=r"no result within 0.1 s"):
        await GroupScorer("mine", timeout_s=0.1, reward=hang).scored([answer()])
