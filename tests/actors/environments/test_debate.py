"""Debaters and their judge, with an engine that answers by who is asked."""

from random import Random

import pytest
from pydantic import ValidationError

from actors.engines.base import Sampling
from actors.environments.base import Environment
from actors.environments.build import build_environment
from actors.episodes.errors import EpisodeError
from actors.episodes.task import Task
from actors.policy.other_engines import OtherEngines
from actors.policy.policy import Policy
from actors.rewards.base import LATER, RewardError
from actors.settings.actors import ActorsConfig
from actors.settings.panel import DebateConfig
from benchmarks.scripted_engine import ScriptedEngine
from bus.errors import ConfigError, RequestRefusedError
from launch.settings.run_config import resolve
from learner.initial.scratch_model import character_tokenizer
from storage.built_in_tasks.demonstrations import DEBATERS, debate_demonstration

TASK = Task(task_id="d", prompt="sort 31", label="13")


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer()


def debating(tokenizer, *rounds, judge=None, opponent=None):
    """Debaters answer in the order in which they are asked; a judge when it is asked."""
    said = iter([answer for answers in rounds for answer in answers])

    def script(tokens):
        asked = tokenizer.decode(tokens)
        answer = judge if " judge " in asked else next(said)
        if isinstance(answer, Exception):
            raise answer
        return tokenizer.encode(f"{answer}<|end|>")

    frozen = ScriptedEngine(lambda _: tokenizer.encode(f"{opponent}<|end|>"), policy_version=1)
    opponents = {} if opponent is None else {"past": frozen}
    return Policy(
        ScriptedEngine(script, policy_version=7),
        tokenizer,
        Sampling(max_new_tokens=16),
        others=OtherEngines(opponents=opponents),
    )


def rewards(episode):
    return {t.agent: t.reward for t in episode.trajectories}


async def test_each_debater_sees_the_answers_of_the_others_in_a_chat_that_grows(tokenizer):
    environment: Environment = build_environment(DebateConfig(debaters=3, rounds=2))
    policy = debating(tokenizer, ["31", "13", "11"], ["13", "13", "33"])
    episode = await environment.run(TASK, policy)
    said = {t.agent: tokenizer.decode(t.token_ids) for t in episode.trajectories}
    begun = "<|user|>sort 31<|assistant|>"
    assert said == {
        "debater-1": f"{begun}31<|end|><|user|>others b 13 c 11<|assistant|>13<|end|>",
        "debater-2": f"{begun}13<|end|><|user|>others a 31 c 11<|assistant|>13<|end|>",
        "debater-3": f"{begun}11<|end|><|user|>others a 31 b 13<|assistant|>33<|end|>",
    }
    assert rewards(episode) == {"debater-1": 1.0, "debater-2": 1.0, "debater-3": 0.0}
    assert episode.outcome == 1.0
    parts = {"solved": pytest.approx(2 / 3), "agreed": pytest.approx(2 / 3), "outcome": 1.0}
    assert [t.reward_components for t in episode.trajectories] == [parts] * 3
    assert [(t.is_trained, len(t.turns), t.end) for t in episode.trajectories] == [(True, 2, "completed")] * 3


@pytest.mark.parametrize(("last", "outcome"), [
    (["13", "31", "13"], 1.0), (["31", "13", "31"], 0.0), (["31", "13", "11"], 0.0),
    (["13", "31", "11"], 1.0), (["31", " 13", "13 "], 1.0),
])  # fmt: skip
async def test_a_vote_takes_the_most_frequent_answer_and_of_equal_ones_the_first(tokenizer, last, outcome):
    environment = build_environment(DebateConfig(debaters=3, rounds=1))
    assert (await environment.run(TASK, debating(tokenizer, last))).outcome == outcome


async def test_the_outcome_and_winning_are_part_of_the_reward_by_their_weights(tokenizer):
    environment = build_environment(DebateConfig(rounds=1, decision_weight=0.5, win_weight=0.25))
    episode = await environment.run(TASK, debating(tokenizer, ["13", "31", "13"]))
    assert rewards(episode) == {"debater-1": 1.75, "debater-2": 0.5, "debater-3": 1.75}
    agreed_on_a_wrong_one = await environment.run(TASK, debating(tokenizer, ["31", "31", "13"]))
    assert rewards(agreed_on_a_wrong_one) == {"debater-1": 0.25, "debater-2": 0.25, "debater-3": 1.0}


@pytest.mark.parametrize(("letter", "outcome"), [("a", 0.0), ("b", 1.0), ("c", 0.0), ("ab", 0.0), ("", 0.0)])
async def test_a_judge_of_the_policy_is_trained_for_what_it_chose(tokenizer, letter, outcome):
    environment = build_environment(DebateConfig(debaters=2, rounds=1, decided_by="self", win_weight=1.0))
    episode = await environment.run(TASK, debating(tokenizer, ["31", "13"], judge=letter))
    judge = episode.trajectories[-1]
    assert tokenizer.decode(judge.token_ids).startswith("<|user|>sort 31 judge a 31 b 13<|assistant|>")
    assert (judge.agent, judge.reward, judge.is_trained, episode.outcome) == ("judge", outcome, True, outcome)
    won = {"a": (1.0, 1.0), "b": (0.0, 2.0)}.get(letter, (0.0, 1.0))
    assert (rewards(episode)["debater-1"], rewards(episode)["debater-2"]) == won


async def test_a_judge_that_is_an_opponent_decides_and_is_not_trained(tokenizer):
    environment = build_environment(DebateConfig(debaters=2, rounds=1, decided_by="past"))
    episode = await environment.run(TASK, debating(tokenizer, ["31", "13"], opponent="b"))
    judge = episode.trajectories[-1]
    assert (judge.policy, judge.is_trained, episode.outcome) == ("past", False, 1.0)
    assert {*judge.policy_versions} == {-1, 1}
    with pytest.raises(EpisodeError, match="no opponent 'past': define it in actors"):
        await environment.run(TASK, debating(tokenizer, ["31", "13"]))


async def test_answers_that_do_not_fit_into_the_judges_context_have_no_winner(tokenizer):
    environment = build_environment(DebateConfig(debaters=2, rounds=1, decided_by="self"))
    policy = debating(tokenizer, ["31", "13"], judge=RequestRefusedError("no room"))
    episode = await environment.run(TASK, policy)
    assert (episode.outcome, len(episode.trajectories), episode.end) == (0.0, 2, "completed")


async def test_a_debater_whose_context_is_full_stands_by_its_last_answer(tokenizer):
    environment = build_environment(DebateConfig(debaters=2, rounds=3))
    full = RequestRefusedError("no room")
    policy = debating(tokenizer, ["31", "13"], [full, "13"], ["11"])
    episode = await environment.run(TASK, policy)
    assert [len(t.turns) for t in episode.trajectories] == [1, 3]
    assert rewards(episode) == {"debater-1": 0.0, "debater-2": 0.0}
    with pytest.raises(RequestRefusedError):  # a prompt that is too long by itself
        await environment.run(TASK, debating(tokenizer, [full, "13"]))


async def test_a_reward_that_comes_later_fails_the_debate(tokenizer):
    environment = build_environment(DebateConfig(rounds=1, reward=f"{__name__}:later"))
    with pytest.raises(RewardError, match="a debate needs it now"):
        await environment.run(TASK, debating(tokenizer, ["1", "2", "3"]))


def later(answer):
    return LATER


@pytest.mark.parametrize(("field", "value"), [
    ("reply_prompt", "others"), ("reply_prompt", "{prompt} {answers}"), ("judge_prompt", "{prompt}"),
    ("judge_prompt", "{answers} {0}"), ("group_reward", "mine:reward"), ("debaters", 1),
])  # fmt: skip
def test_settings_that_make_no_debate_are_refused(field, value):
    with pytest.raises(ValidationError, match=field):
        DebateConfig.model_validate({field: value})


def test_a_judge_that_is_no_opponent_of_the_run_is_refused():
    judged = {"type": "debate", "decided_by": "past"}
    with pytest.raises(ConfigError, match=r"decided_by='past' is none of opponents \(none\): define it"):
        resolve({"actors": {"environment": judged}})
    ActorsConfig(environment=judged, opponents={"past": {"version": "latest - 3"}})


def test_demonstrations_of_the_debate_ask_as_its_environment_does():
    reply, openings, wrong = DebateConfig().reply_prompt, 0, 0
    for seed in range(200):
        is_wrong = seed % 2 == 1
        chat, answer = debate_demonstration(4213, Random(seed), is_wrong)
        assert chat[0] == {"role": "user", "content": "sort 4213"}
        if len(chat) == 1:
            openings += 1
            assert (answer == "1234") != is_wrong
            continue
        said = chat[2]["content"].removeprefix("others ")
        assert chat[2]["content"] == reply.format(answers=said)
        letters = said.split()[::2]
        assert len(letters) == DEBATERS - 1
        assert set(letters) < set("abc")
        assert answer == (chat[1]["content"] if is_wrong else "1234")
        wrong += answer != "1234"
    assert 50 < openings < 150
    assert wrong > 10
