"""Solvers, rewriters and a selector, with an engine that answers by who is asked."""

from random import Random

import pytest
from pydantic import ValidationError

from actors.engines.base import Sampling
from actors.environments.base import Environment
from actors.environments.build import build_environment
from actors.episodes.task import Task
from actors.policy.policy import Policy
from actors.rewards.base import LATER, RewardError
from actors.settings.panel import PanelConfig
from benchmarks.scripted_engine import ScriptedEngine
from learner.initial.scratch_model import character_tokenizer
from storage.built_in_tasks.demonstrations import panel_demonstration

TASK = Task(task_id="p", prompt="sort 31", label="13")


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer()


def answering(tokenizer, *, solvers, rewriters, selector):
    """Solvers and rewriters answer in the order in which they are asked."""
    drafts, rewritten = iter(solvers), iter(rewriters)

    def script(tokens):
        asked = tokenizer.decode(tokens)
        if " which " in asked:
            return tokenizer.encode(f"{selector}<|end|>")
        said = next(rewritten) if " drafts " in asked else next(drafts)
        return tokenizer.encode(f"{said}<|end|>")

    return Policy(ScriptedEngine(script), tokenizer, Sampling(max_new_tokens=16))


def rewards(episode):
    return {t.agent: t.reward for t in episode.trajectories}


async def test_each_agent_sees_what_those_before_it_wrote_and_has_its_own_reward(tokenizer):
    environment: Environment = build_environment(PanelConfig(solvers=2, rewriters=2))
    policy = answering(tokenizer, solvers=["31", "13"], rewriters=["13", "11"], selector="a")
    episode = await environment.run(TASK, policy)
    asked = {t.agent: tokenizer.decode(t.token_ids[: t.turns[0].start]) for t in episode.trajectories}
    assert asked["solver-1"] == asked["solver-2"] == "<|user|>sort 31<|assistant|>"
    assert asked["rewriter-1"] == asked["rewriter-2"] == "<|user|>sort 31 drafts a 31 b 13<|assistant|>"
    assert asked["selector"] == "<|user|>sort 31 which a 13 b 11<|assistant|>"
    assert rewards(episode) == {
        "solver-1": 0.0, "solver-2": 1.0, "rewriter-1": 1.0, "rewriter-2": 0.0, "selector": 1.0,
    }  # fmt: skip
    assert (episode.outcome, len(episode.trajectories)) == (1.0, environment.trajectories_per_episode)
    parts = {"solved": 0.5, "rewritten": 0.5, "outcome": 1.0}
    assert [t.reward_components for t in episode.trajectories] == [parts] * 5
    assert all(t.is_trained for t in episode.trajectories)


@pytest.mark.parametrize("choice", ["b", "c", "ab", "", "13", "\u00aa"])
async def test_a_selector_that_chooses_a_wrong_answer_or_none_gets_nothing(tokenizer, choice):
    environment = build_environment(PanelConfig(solvers=1, rewriters=2))
    policy = answering(tokenizer, solvers=["31"], rewriters=["13", "11"], selector=choice)
    assert rewards(await environment.run(TASK, policy))["selector"] == 0.0


async def test_the_outcome_may_be_shared_with_those_who_led_to_it(tokenizer):
    environment = build_environment(PanelConfig(solvers=1, rewriters=1, outcome_weight=0.5))
    policy = answering(tokenizer, solvers=["31"], rewriters=["13"], selector="a")
    assert rewards(await environment.run(TASK, policy)) == {
        "solver-1": 0.5, "rewriter-1": 1.5, "selector": 1.0,
    }  # fmt: skip


async def test_earlier_messages_of_the_task_stay_in_front(tokenizer):
    environment = build_environment(PanelConfig(solvers=1, rewriters=1))
    chat = [{"role": "user", "content": "be brief"}, {"role": "user", "content": "sort 31"}]
    policy = answering(tokenizer, solvers=["31"], rewriters=["13"], selector="a")
    episode = await environment.run(Task(task_id="p", prompt=chat, label="13"), policy)
    asked = tokenizer.decode(episode.trajectories[1].token_ids)
    assert asked.startswith("<|user|>be brief<|user|>sort 31 drafts a 31<|assistant|>")


async def test_a_reward_that_comes_later_fails_the_episode(tokenizer):
    environment = build_environment(PanelConfig(solvers=1, rewriters=1, reward=f"{__name__}:later"))
    policy = answering(tokenizer, solvers=["31"], rewriters=["13"], selector="a")
    with pytest.raises(RewardError, match="a panel needs it now"):
        await environment.run(TASK, policy)


def later(answer):
    return LATER


@pytest.mark.parametrize(("field", "template"), [
    ("rewriter_prompt", "{prompt}"), ("selector_prompt", "{answers} {other}"),
    ("rewriter_prompt", "{answers"),
])  # fmt: skip
def test_prompts_that_cannot_be_filled_in_are_refused(field, template):
    with pytest.raises(ValidationError, match=field):
        PanelConfig.model_validate({field: template})


def test_demonstrations_of_the_panel_ask_as_its_environment_does(tokenizer):
    templates = PanelConfig()
    for number in range(60):
        [message], answer = panel_demonstration(12345 + number, Random(number), False)
        question, _, rest = message["content"].partition(" drafts ")
        if rest:
            assert message["content"] == templates.rewriter_prompt.format(prompt=question, answers=rest)
            assert answer == "".join(sorted(question.removeprefix("sort ")))
        elif " which " in message["content"]:
            question, _, rest = message["content"].partition(" which ")
            assert message["content"] == templates.selector_prompt.format(prompt=question, answers=rest)
            lettered = dict(zip(rest.split()[::2], rest.split()[1::2], strict=True))
            label = "".join(sorted(question.removeprefix("sort ")))
            assert lettered[answer] == label or label not in lettered.values()
