"""`launch try`: what a model does with a few prompts, as text."""

import asyncio
import re

import pytest

from actors.engines.base import Sampling
from actors.environments.tools import ToolChat
from actors.episodes.task import Task
from actors.settings.tool_chat import ToolsConfig
from benchmarks.scripted_engine import ScriptedEngine
from bus.errors import ConfigError
from launch.checks.trial import Trial, WatchedPolicy, show, shown_on, try_model
from launch.settings.run_config import resolve
from tests.launch.model_directory import QWEN, directory

END = QWEN.convert_tokens_to_ids("<|im_end|>")
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2*21"}}\n</tool_call><|im_end|>'


async def test_calls_stop_tokens_and_rewards_are_shown_turn_by_turn(tmp_path, capsys):
    answers = iter([f"<think>hm</think>{CALL}", "it is 42<|im_end|>"])
    engine = ScriptedEngine(lambda _: QWEN.encode(next(answers), add_special_tokens=False))
    policy = WatchedPolicy(engine, QWEN, Sampling(stop_token_ids=(END,), max_new_tokens=200))
    settings = {"type": "tools", "reward": "last_number", "tools": [{"type": "calculator"}], "max_turns": 2}
    environment = ToolChat.from_config(ToolsConfig.model_validate(settings))
    trial, said = Trial(QWEN, (END,)), []
    tasks = [Task(task_id="try-0", prompt="What is 2*21?", label="42")]
    await show(tasks, environment, policy, trial, said.append)
    [shown] = said
    text = shown.plain
    order = [
        "=== prompt 1 of 1", "<|im_start|>user\nWhat is 2*21?<|im_end|>", "tokens, ended by <|im_end|>",
        "<think>hm",
        "--- reasoning: 'hm'", '--- call: calculator {"expression": "2*21"}', "<tool_response>\n42\n",
        "it is 42<|im_end|>", "--- reward 1, label '42', end completed",
    ]  # fmt: skip
    places = [text.find(part) for part in order]
    assert -1 not in places, text
    assert places == sorted(places), text
    assert "1 rewards, 1 in the mean; 0 rollouts failed" in trial.summary()
    assert "2 answers ended by a stop token, 0 cut off" in trial.summary()
    assert "1 tool calls, 0 malformed" in trial.summary()
    trained = [text[span.start : span.end] for span in shown.spans if span.style == "green"]
    assert trained == [f"<think>hm</think>{CALL}", "it is 42<|im_end|>"]
    with shown_on(tmp_path / "page.html") as say:
        say(shown)
    assert capsys.readouterr().out == f"{text}\n"
    page = (tmp_path / "page.html").read_text()
    [style] = set(re.findall(r'class="(r\d+)">it is 42&lt;\|im_end\|&gt;</span>', page))
    assert f'<span class="{style}">&lt;think&gt;hm' in page
    for wrong, why in (("nowhere/page.html", "No such file or directory"), (".", "Is a directory")):
        with pytest.raises(ConfigError, match=f"{why}: name a file"), shown_on(tmp_path / wrong):
            pytest.fail("nothing is tried in vain")


async def test_calls_in_tags_are_counted_too():
    said = iter(["<calculator>2*21</calculator>", "it is 42<|im_end|>"])
    engine = ScriptedEngine(lambda _: QWEN.encode(next(said), add_special_tokens=False))
    policy = WatchedPolicy(engine, QWEN, Sampling(stop_token_ids=(END,), max_new_tokens=200))
    settings = {
        "type": "tools", "reward": "last_number", "tools": [{"type": "calculator"}], "calls": "tags",
        "stop_at_call": True,
    }  # fmt: skip
    trial = Trial(QWEN, (END,))
    environment = ToolChat.from_config(ToolsConfig.model_validate(settings))
    await show([Task(task_id="try-0", prompt="2*21?", label="42")], environment, policy, trial, [].append)
    assert "1 tool calls, 0 malformed" in trial.summary()


async def test_what_fails_is_shown_as_itself_and_what_never_ends_is_pointed_out():
    engine = ScriptedEngine(lambda _: QWEN.encode("and so on", add_special_tokens=False))
    policy = WatchedPolicy(engine, QWEN, Sampling(stop_token_ids=(END,), max_new_tokens=4))
    settings = {"type": "tools", "reward": "last_number", "tools": [{"type": "calculator"}]}
    environment = ToolChat.from_config(ToolsConfig.model_validate(settings))
    trial, said = Trial(QWEN, (END,)), []
    unknown = {"type": "function", "function": {"name": "other"}}
    tasks = [
        Task(task_id="try-0", prompt="1+1", label="2"),
        Task(task_id="try-1", prompt="1+1", label="2", tools=[unknown]),
    ]
    await show(tasks, environment, policy, trial, said.append)
    assert "cut off at its limit" in said[0].plain
    assert "failed: EpisodeError" in said[1].plain
    assert "it offers the tool 'other'" in said[1].plain
    hopeless = Trial(QWEN, (END,))
    hopeless.shown(tasks[1], ValueError("no"), [], 0.0)
    assert hopeless.summary().startswith("no reward; 1 rollouts failed\n")
    assert "No answer ended by itself: look whether the stop tokens above" in trial.summary()


@pytest.mark.slow
async def test_a_directory_is_tried_with_the_settings_of_a_run(tmp_path):
    model, said = directory(tmp_path), []
    layer = {
        "model": {"path": model},
        "data": {"prompts": model / "p.jsonl"},
        "sampling": {"max_new_tokens": 8},
        "actors": {"environment": {"reward": "last_number"}},
        "directory": tmp_path / "runs",
    }
    await try_model(resolve(layer), asyncio.Event(), count=2, say=said.append)
    whole = "\n".join(map(str, said))
    assert "Answers end with <|im_end|> (257: chat template), <|endoftext|> (258: tokenizer)." in whole
    shown = r"=== prompt 2 of 2\n--- context, \d+ tokens\n<\|im_start\|>user\n1\+1=<\|im_end\|>"
    assert re.search(shown, whole)
    assert len(re.findall("--- reward [01], label", whole)) == 2  # a random answer may be right
    assert not (tmp_path / "runs").exists()


async def test_a_run_without_a_model_of_its_own_has_nothing_to_show():
    with pytest.raises(ConfigError, match=r"name one by --model\.path"):
        await try_model(resolve({}), asyncio.Event(), count=1, say=print)
