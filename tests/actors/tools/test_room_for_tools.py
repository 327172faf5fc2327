"""Episodes that wait for room wait for others of their kind, and that is no time of their calls."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from actors.environments.tools import ToolChat
from actors.episodes.errors import ToolError
from actors.episodes.task import Task
from actors.rewards.scoring.answer_scoring import AnswerScoring
from actors.settings.sandbox_tools import SandboxToolConfig
from actors.settings.tool_chat import ToolsConfig
from actors.tools.base import ToolResult
from actors.tools.build import build_tools
from actors.tools.episode_tools import EpisodeTools
from tests.actors.virtual_time import run_virtually

CONFIG = ToolsConfig(type="tools", tools=[{"type": "sandbox"}], tool_timeout_s=120, reward="exact")


class Crowded:
    """A tool whose state opens when others have ended."""

    name, description, parameters = "shell", "Waits.", {}

    def __init__(self, opens_after_s: float, room_wait_s: float) -> None:
        self.room_wait_s = room_wait_s
        self._opens_after_s = opens_after_s

    @asynccontextmanager
    async def episode(self, task):
        await asyncio.sleep(self._opens_after_s)
        yield self

    async def call(self, tool, arguments):
        return ToolResult("done")

    async def close(self):
        pass


async def called(tool: Crowded) -> tuple[ToolResult, EpisodeTools]:
    chat = ToolChat(CONFIG, {tool.name: tool}, AnswerScoring.from_config(CONFIG))
    tools = EpisodeTools(Task(task_id="t", prompt="x"))
    try:
        return await chat._called(tool, {}, tools), tools
    finally:
        await tools.close()


def test_a_call_may_wait_for_room_for_longer_than_it_may_take():
    async def waits():
        result, _ = await called(Crowded(opens_after_s=300, room_wait_s=600))
        assert result.text == "done"

    run_virtually(waits())


def test_who_finds_no_room_is_told_so_and_the_model_is_not_to_blame():
    async def waits():
        with pytest.raises(ToolError, match="waited for 600 s and found no room"):
            await called(Crowded(opens_after_s=700, room_wait_s=600))

    run_virtually(waits())


async def test_a_time_limit_of_a_tools_own_is_no_lack_of_room():
    class Away(Crowded):
        @asynccontextmanager
        async def episode(self, task):
            raise TimeoutError("its service is away")
            yield self

    with pytest.raises(ToolError, match=r"'shell' did not open: TimeoutError\('its service is away'\)"):
        await called(Away(opens_after_s=0, room_wait_s=600))


@pytest.mark.parametrize("held_out", [False, True])
async def test_held_out_tasks_and_those_of_training_do_not_wait_for_one_another(held_out):
    shell = build_tools([SandboxToolConfig(offers=("shell",), at_once=1)])["shell"]
    these = Task(task_id="t", prompt="x", heldout=held_out)
    other = Task(task_id="o", prompt="x", heldout=not held_out)

    async def opened() -> None:
        async with shell.episode(these):
            pass

    async with shell.episode(these):
        waiting = [asyncio.create_task(opened()) for _ in range(2)]
        async with asyncio.timeout(60), shell.episode(other) as state:
            assert (await state.call("shell", {"command": "echo went on"})).text == "went on"
        assert not any(one.done() for one in waiting)
    await asyncio.gather(*waiting)
    await shell.close()
