"""The presets whose answers only a tool knows, with their own tools and an engine that follows a script."""

import asyncio
import re
import sys

import pytest

from actors.engines.base import Sampling
from actors.environments.build import build_environment
from actors.episodes.task import Task
from actors.policy.policy import Policy
from benchmarks.scripted_engine import ScriptedEngine
from bus.errors import ConfigError
from launch.checks.start_checks import rehearse_local
from launch.settings.run_config import preset, resolve
from storage.built_in_tasks.lookup_tasks import SHOP_TOOLS, search_demonstration, search_problem, shop_problem
from tests.actors.gateway.served import TOKENIZER, script

NUMBERS = range(0, 14_000, 701)
LAST = re.compile(r"<result>(?:\[1\] [^:]*: )?(\w+)")
"""The answer in what a tool has said, which is that of the first passage."""


async def rolled_out(name, problem, answering):
    """Roll some problems out in the environment of a preset; return trajectories, and their texts."""
    environment = build_environment(resolve(preset(name)).actors.environment)
    policy = Policy(ScriptedEngine(script(answering)), TOKENIZER, Sampling(max_new_tokens=32))
    try:
        tasks = [
            Task(task_id=f"g{n}.0", prompt=question, label=label)
            for n, (question, label) in zip(NUMBERS, map(problem, NUMBERS), strict=True)
        ]
        episodes = await asyncio.gather(*(environment.run(task, policy) for task in tasks))
    finally:
        await environment.close()
    trajectories = [trajectory for episode in episodes for trajectory in episode.trajectories]
    return trajectories, [TOKENIZER.decode(trajectory.token_ids) for trajectory in trajectories]


def question_in(chat: str) -> str:
    return chat.partition("user ")[2].partition("?")[0]


def searching(chat: str) -> str:
    found = LAST.search(chat)
    return found[1] if found else f"<search>{question_in(chat)}</search>"


def asking_the_shop(chat: str) -> str:
    kind, _, item = question_in(chat).partition(" of ")
    said = LAST.search(chat)
    return said[1] if said else f"<{kind}>{item}</{kind}>"


@pytest.mark.slow
async def test_a_search_for_the_fact_finds_its_passage_first_as_in_the_demonstrations():
    trajectories, chats = await rolled_out("search", search_problem, searching)
    assert [trajectory.reward for trajectory in trajectories] == [1.0] * len(NUMBERS)
    for number, trajectory, chat in zip(NUMBERS, trajectories, chats, strict=True):
        shown = search_demonstration(number, SecondTurn(), False)[0][-1]["content"]
        first, second = chat.partition("<result>")[2].partition("</result>")[0].splitlines()
        assert f"<result>{first}\n" == shown.partition("[2]")[0]
        assert second.startswith("[2] ")
        assert "<result>" not in TOKENIZER.decode(trajectory.token_ids[trajectory.loss_mask])


class SecondTurn:
    """Stands for a generator of random numbers by which a demonstration is of the second turn."""

    def random(self) -> float:
        return 0.9

    def choice(self, values):
        return values[0]


@pytest.mark.nightly
@pytest.mark.slow
async def test_a_search_for_another_fact_finds_what_earns_nothing():
    def astray(chat: str) -> str:
        kind, _, name = question_in(chat).partition(" of ")
        other = "work" if kind == "home" else "home"
        return searching(chat) if "<result>" in chat else f"<search>{other} of {name}</search>"

    trajectories, chats = await rolled_out("search", search_problem, astray)
    assert all("[1] " in chat for chat in chats)
    assert sum(trajectory.reward for trajectory in trajectories) <= 1


@pytest.mark.slow
async def test_the_tool_that_the_question_names_answers_from_the_server_that_the_preset_starts():
    trajectories, chats = await rolled_out("mcp", shop_problem, asking_the_shop)
    assert [trajectory.reward for trajectory in trajectories] == [1.0] * len(NUMBERS)
    assert {tool for tool in SHOP_TOOLS if any(f"<{tool}>" in chat for chat in chats)} == {*SHOP_TOOLS}


@pytest.mark.nightly
@pytest.mark.slow
async def test_an_item_that_is_not_sold_is_a_call_that_has_failed():
    def wrong(chat: str) -> str:
        return "0" if "<result>" in chat else "<price>cash</price>"

    trajectories, chats = await rolled_out("mcp", shop_problem, wrong)
    assert all("no such item" in chat for chat in chats)
    assert [trajectory.metadata["tool_failures"] for trajectory in trajectories] == [1] * len(NUMBERS)


@pytest.mark.parametrize(
    ("name", "package", "module"),
    [("search", "bm25s", "actors.tools.search"), ("mcp", "mcp", "actors.tools.mcp")],
)
async def test_a_package_that_is_missing_is_named_before_anything_starts(
    name, package, module, monkeypatch, tmp_path
):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, module, raising=False)
    config = resolve(preset(name), {"directory": tmp_path})
    with pytest.raises(ConfigError, match=rf"pip install 'sluice-rl\[{name}\]'"):
        await rehearse_local(config, asyncio.Event(), own_bus=True)
