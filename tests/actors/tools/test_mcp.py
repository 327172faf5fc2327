"""Tools of MCP servers, over stdio and HTTP, with real servers."""

import asyncio
import socket
import subprocess
import sys
import threading
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from actors.episodes.errors import ToolError
from actors.episodes.task import Task
from actors.settings.tools import McpConfig
from actors.tools.base import ToolResult
from actors.tools.build import build_tools
from actors.tools.episode_tools import EpisodeTools
from bus.errors import ConfigError
from bus.process.plugins import ImportPolicy, restrict_imports

SERVER = str(Path(__file__).with_name("mcp_server.py"))
PAGES = str(Path(__file__).with_name("mcp_pages_server.py"))
STDIO = (sys.executable, SERVER, "stdio")


@pytest.mark.slow
async def test_a_servers_tools_are_called_over_stdio(monkeypatch):
    monkeypatch.setenv("SLUICE_BUS", "nats://user:password@host")
    tools = build_tools([McpConfig(command=("{python}", SERVER, "stdio"), environment={"OWN": "1"})])
    try:
        assert set(tools) == {"add", "fail", "die", "environment", "keep", "hang"}
        assert tools["add"].description == "Add two numbers."
        assert set(tools["add"].parameters["properties"]) == {"a", "b"}
        assert await tools["add"].call({"a": 2, "b": 3}) == ToolResult("5")
        failed = await tools["fail"].call({})
        assert failed.failed
        assert "fail" in failed.text
        assert (await tools["add"].call({"a": "x"})).failed
        names = (await tools["environment"].call({})).text.split()
        assert "OWN" in names
        assert "SLUICE_BUS" not in names
        with pytest.raises(ToolError, match=r"mcp_server\.py stdio"):
            await tools["die"].call({})
        assert await tools["add"].call({"a": 1, "b": 1}) == ToolResult("2")  # it is started again
    finally:
        await tools["add"].close()


@pytest.mark.slow
async def test_tools_of_all_pages_are_there_and_answers_of_other_forms_are_read():
    """GitHub's server answers with files, and some answer with structured content alone."""
    tools = build_tools([McpConfig(command=(sys.executable, PAGES))])
    try:
        said = [await tools[name].call({}) for name in ("structured", "file", "link")]
    finally:
        await tools["file"].close()
    assert len(tools) == 3
    assert said == [
        ToolResult('{"rows": [1, "ü"]}'),
        ToolResult("it is:\nwhole file\n[resource]"),
        ToolResult("[resource_link file:///b.txt]", failed=True),
    ]


@pytest.mark.slow
async def test_each_episode_has_a_session_of_its_own():
    tools = build_tools([McpConfig(command=STDIO)])
    episodes = [EpisodeTools(Task(task_id=name, prompt=name)) for name in ("a", "b")]
    try:
        said = [await one.call(tools["keep"], {"text": text}) for text in "xy" for one in episodes]
        assert [one.text for one in said] == ["x", "x", "x y", "x y"]
        other = await episodes[0].call(tools["add"], {"a": 1, "b": 1})  # of the same session
        assert other == ToolResult("2")
        assert len(episodes[0]._states) == 1
    finally:
        await asyncio.gather(*(one.close() for one in episodes))
        await tools["add"].close()


@pytest.mark.slow
async def test_a_server_that_episodes_share_is_started_again_when_it_hangs(monkeypatch):
    from actors.tools import mcp

    monkeypatch.setattr(mcp, "PING_S", 1.0)
    tools = build_tools([McpConfig(command=STDIO, sessions="shared")])
    try:
        for text, kept in ("x", "x"), ("y", "x y"):
            episode = EpisodeTools(Task(task_id=text, prompt="go"))
            assert (await episode.call(tools["keep"], {"text": text})).text == kept
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await tools["hang"].call({})
        async with asyncio.timeout(90):
            while (said := await kept_by(tools)) != "z":  # the program that kept "x" is gone
                assert said is None
    finally:
        await tools["add"].close()


async def kept_by(tools):
    try:
        async with asyncio.timeout(30):
            return (await tools["keep"].call({"text": "z"})).text
    except TimeoutError:
        return None


@pytest.mark.slow
async def test_a_call_cancelled_while_it_connects_again_leaves_the_connection_to_the_next(monkeypatch):
    from actors.tools import mcp  # takes half a second to import, and only this needs it

    transport, entered, let_in = mcp._transport, threading.Event(), threading.Event()

    @asynccontextmanager
    async def held(config):
        entered.set()
        assert await asyncio.to_thread(let_in.wait, 20)
        async with transport(config) as streams:
            yield streams

    tools = build_tools([McpConfig(command=STDIO)])
    try:
        with pytest.raises(ToolError):
            await tools["die"].call({})
        monkeypatch.setattr(mcp, "_transport", held)
        first = asyncio.create_task(tools["add"].call({"a": 1, "b": 1}))
        assert await asyncio.to_thread(entered.wait, 20)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        second = asyncio.create_task(tools["add"].call({"a": 2, "b": 2}))
        let_in.set()
        assert await second == ToolResult("4")
    finally:
        let_in.set()
        await tools["add"].close()


@pytest.mark.slow
async def test_a_servers_tools_are_called_over_http():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, SERVER, "http", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)  # noqa: ASYNC220  # it returns at once
    try:
        await_port(port, process)
        [tool] = build_tools([McpConfig(url=f"http://127.0.0.1:{port}/mcp", allowed=("add",))]).values()
        assert await tool.call({"a": 2, "b": 3}) == ToolResult("5")
        process.kill()
        process.wait(60)
        with pytest.raises(ToolError):
            await tool.call({"a": 2, "b": 3})
        await tool.close()
    finally:
        process.kill()
        process.wait(60)


def await_port(port, process):
    while process.poll() is None:
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
    pytest.fail("the server ended")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"command": ("no-such-program",)}, "FileNotFoundError"),
        ({"command": (sys.executable, "-c", "pass")}, "MCP server .*: no list of its tools"),
        (
            {"command": (sys.executable, "-c", "import time; time.sleep(60)"), "start_timeout_s": 0.3},
            "TimeoutError",
        ),
        ({"url": "http://127.0.0.1:9/mcp"}, "no list of its tools"),
        (
            {"command": STDIO, "allowed": ("sub",)},
            "has no tool sub; there are: add, fail, die, environment, ",
        ),
    ],
)
def test_a_server_that_cannot_be_used_is_a_config_error(settings, said):
    with pytest.raises(ConfigError, match=said):
        build_tools([McpConfig(**settings)])


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (ImportPolicy(refusal="comes from the run's record"), "comes from the run's record"),
        (ImportPolicy(directories=(Path("/"),)), "allows modules only"),
    ],
)
def test_a_stranger_cannot_have_a_program_started(policy, said):
    try:
        restrict_imports(policy)
        with pytest.raises(ConfigError, match=said):
            build_tools([McpConfig(command=STDIO)])
    finally:
        restrict_imports(ImportPolicy())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "name a program to start or an address"),
        ({"command": ("x",), "url": "http://x"}, "one of the two"),
        ({"url": "localhost:1"}, "is no URL"),
    ],
)
def test_an_mcp_server_is_a_program_or_an_address(settings, said):
    with pytest.raises(ValueError, match=said):
        McpConfig(**settings)
