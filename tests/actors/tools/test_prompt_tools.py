"""Tools that a prompt offers: shown in a single turn, a choice among tools, or refused."""

import pytest

from actors.environments.build import build_environment
from actors.environments.prompt_choices import refuse_unknown_choices
from actors.episodes.errors import EpisodeError
from actors.episodes.task import Task
from actors.policy.policy import Policy
from actors.settings.actors import ActorsConfig
from benchmarks.scripted_engine import ScriptedEngine
from bus.errors import ConfigError
from bus.messages import Prompt
from tests.actors.environments.scripted_tool_chats import (
    LONG,
    Model,
    environment_of,
    rolled_out,
    tool_tokenizer,
)


@pytest.fixture(scope="module")
def tokenizer():
    return tool_tokenizer()


def offering(*names):
    return [{"type": "function", "function": {"name": name, "parameters": {}}} for name in names]


def prompt_with(*names, **metadata):
    return Prompt(content="6*7", label="42", tools=offering(*names), metadata=metadata)


async def test_a_single_turn_shows_the_tools_of_its_prompt(tokenizer):
    model = Model(tokenizer, "42<|end|>")
    policy = Policy(ScriptedEngine(model), tokenizer, LONG)
    environment = build_environment(ActorsConfig().environment)
    for prompt in (prompt_with("weather", "clock"), Prompt(content="6*7", label="42")):
        episode = await environment.run(Task.of(prompt, "t"), policy)
        assert episode.trajectories[0].reward == 1.0
    assert model.saw == ["<|system|>weather clock <|user|>6*7<|assistant|>", "<|user|>6*7<|assistant|>"]


TWO = ({"type": "calculator", "name": "calc"}, {"type": "calculator", "name": "abacus"})
CALL = '<tool_call>{"name": "calc", "arguments": {"expression": "6*7"}}</tool_call><|end|>'


async def test_tools_of_a_prompt_choose_among_those_of_the_environment(tokenizer):
    environment = environment_of(*TWO, calls="native")
    for offered, seen, wrong in ((["abacus"], "abacus ", 1), (["calc"], "calc ", 0), ([], "calc abacus ", 0)):
        task = Task.of(prompt_with(*offered), "t")
        episode, model = await rolled_out(environment, tokenizer, CALL, "42<|end|>", task=task)
        assert model.saw[0] == f"<|system|>{seen}<|user|>6*7<|assistant|>"
        assert episode.metrics["rollout/malformed_calls"] == wrong
    with pytest.raises(EpisodeError, match=r"task t: it offers the tool 'weather', .* it has calc, abacus:"):
        await rolled_out(environment, tokenizer, CALL, task=Task.of(prompt_with("weather"), "t"))


async def test_tags_of_tools_that_a_prompt_does_not_offer_are_text(tokenizer):
    environment = environment_of(*TWO, stop_at_call=True)
    task = Task.of(prompt_with("abacus"), "t")
    episode, _ = await rolled_out(environment, tokenizer, "<calc>6*7</calc><|end|>", task=task)
    assert (episode.metrics["rollout/tool_calls"], episode.metrics["rollout/turns"]) == (0, 1)


ACTORS = ActorsConfig.model_validate({
    "environments": [
        {"name": "calc", "environment": {"type": "tools", "tools": [*TWO]}},
        {"name": "mine", "environment": {"type": "tools", "tools": [{"type": "plugin", "tool": "a:b"}]}},
        {"name": "nim", "environment": {"type": "game", "game": {"type": "nim"}}},
        {"name": "panel", "environment": {"type": "panel"}},
        {"name": "debate", "environment": {"type": "debate"}},
    ],
})  # fmt: skip


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "calc",
            "prompt 1: it offers the tool 'weather', .* define it in actors.environment.tools, or leave",
        ),
        ("nim", "prompt 1: it offers tools, which the environment 'game' does not show"),
        ("panel", "'panel' does not show .* use single_turn or tools, or leave them unread by data"),
        ("debate", "the environment 'debate' does not show"),
    ],
)
async def test_tools_that_an_environment_cannot_offer_are_refused_before_and_in_it(tokenizer, name, message):
    prompt = prompt_with("weather", environment=name)
    with pytest.raises(ConfigError, match=message):
        refuse_unknown_choices([prompt], ACTORS, where="mine.jsonl")
    environment = build_environment(ACTORS.by_name[name])
    with pytest.raises(EpisodeError, match=message.removeprefix("prompt 1: ")):
        await environment.run(Task.of(prompt, "t"), Policy(ScriptedEngine(len), tokenizer, LONG))


def test_tools_that_environments_can_offer_pass():
    prompts = [
        prompt_with("weather"),
        prompt_with("calc", environment="calc"),
        prompt_with("x", environment="mine"),
    ]
    refuse_unknown_choices(prompts, ACTORS, where="mine.jsonl")
