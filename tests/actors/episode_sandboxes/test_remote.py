"""Sandboxes behind a server: the same commands, room, tokens, and what nobody uses any more."""

import asyncio
from contextlib import asynccontextmanager

import aiohttp
import pytest

from actors.episode_sandboxes import remote
from actors.episode_sandboxes.base import EpisodeSandbox
from actors.episode_sandboxes.remote import RemoteBackend
from actors.episode_sandboxes.server import SandboxServer
from actors.episodes.errors import ToolError, ToolFailedError
from actors.episodes.task import Task
from actors.settings.episode_sandboxes import RemoteSandboxes, SandboxLimits, SandboxServerConfig
from actors.settings.sandbox_tools import SandboxToolConfig
from actors.tools.build import build_tools
from actors.tools.episode_tools import EpisodeTools
from bus.errors import ConfigError
from tests.actors.episode_sandboxes.backends import said
from tests.actors.episode_sandboxes.protocol import does_what_a_sandbox_does

TOKEN = "SLUICE_SANDBOX_TOKEN"


@asynccontextmanager
async def server_of(monkeypatch, **settings):
    """A server, and a client of it."""
    monkeypatch.setenv(TOKEN, "secret")
    monkeypatch.setattr(remote, "ASK_AGAIN_S", 0.01)
    server, stop = SandboxServer(SandboxServerConfig(port=0, **settings)), asyncio.Event()
    serving = asyncio.create_task(server.serve(stop))
    url = f"http://127.0.0.1:{await asyncio.wait_for(server.port, 20)}"
    backend = RemoteBackend(RemoteSandboxes(url=url, start_timeout_s=30))
    try:
        yield server, backend, url
    finally:
        await backend.close()
        stop.set()
        await serving


async def test_a_remote_sandbox_does_what_a_near_one_does(monkeypatch):
    async with server_of(monkeypatch, at_once=1) as (_, backend, url):
        sandbox = EpisodeSandbox(await backend.start(None, SandboxLimits()))
        await does_what_a_sandbox_does(sandbox)
        hurried = RemoteBackend(RemoteSandboxes(url=url, start_timeout_s=0.5))
        with pytest.raises(ToolError, match=r"has lent no sandbox after 0\.5 s"):
            await hurried.start(None, SandboxLimits())
        await hurried.close()
        waiting = asyncio.create_task(backend.start(None, SandboxLimits()))
        await sandbox.close()
        other = EpisodeSandbox(await waiting)
        assert await said(other, "ls") == ""
        with pytest.raises(ToolFailedError, match="no such sandbox any more"):
            await said(sandbox, "true")


async def test_a_server_may_take_as_long_to_start_a_sandbox_as_the_settings_say(monkeypatch):
    async with server_of(monkeypatch) as (server, backend, _):
        monkeypatch.setitem(RemoteBackend.ask.__kwdefaults__, "timeout_s", 0.1)
        started = server._pool._backend.start

        async def late(*wish):
            await asyncio.sleep(0.3)
            return await started(*wish)

        monkeypatch.setattr(server._pool._backend, "start", late)
        assert await backend.start(None, SandboxLimits())


async def test_a_sandbox_that_nobody_uses_is_ended_and_one_in_use_is_not(monkeypatch):
    async with server_of(monkeypatch, idle_s=0.2) as (server, backend, _):
        left, used = [EpisodeSandbox(await backend.start(None, SandboxLimits())) for _ in range(2)]
        assert await said(used, "sleep 0.8; echo 1") == "1\n"
        assert len(server._lent) == 1
        with pytest.raises(ToolFailedError, match="has ended"):
            await said(left, "true")


async def test_limits_are_those_of_the_actor_and_no_higher_than_the_servers(monkeypatch):
    async with server_of(monkeypatch, disk_mb=8, processes=32) as (_, backend, _):
        limits = SandboxLimits(disk_mb=16, processes=16, cpu_s=77)
        sandbox = EpisodeSandbox(await backend.start(None, limits))
        script = "df --output=size -m /workspace | tail -1; ulimit -t; grep processes /proc/self/limits"
        assert (await said(sandbox, script)).split()[:5] == ["8", "77", "Max", "processes", "16"]


@pytest.mark.nightly
async def test_a_large_workspace_is_packed_and_brought_back(monkeypatch):
    async with server_of(monkeypatch, disk_mb=1024) as (_, backend, _):
        sandbox = EpisodeSandbox(await backend.start(None, SandboxLimits(disk_mb=1024)))
        made = await said(sandbox, "head -c 600M /dev/urandom > f; md5sum f", timeout_s=120)
        snapshot = await sandbox.snapshot()
        await said(sandbox, "rm f")
        await sandbox.restore(snapshot)
        assert await said(sandbox, "md5sum f", timeout_s=120) == made


async def unlent(server):
    while server._lent:  # noqa: ASYNC110 - the server has no event for it
        await asyncio.sleep(0.01)


async def test_the_end_of_one_sandbox_that_fails_keeps_no_other_alive(monkeypatch):
    async def fails():
        raise ToolError("the daemon does not answer")

    async with server_of(monkeypatch, idle_s=0.1) as (server, backend, _):
        await backend.start(None, SandboxLimits())
        [first] = server._lent.values()
        first.opened.push_async_callback(fails)
        async with asyncio.timeout(30):
            await unlent(server)
            await backend.start(None, SandboxLimits())
            await unlent(server)


async def test_the_check_of_an_episode_needs_no_second_place(monkeypatch):
    async with server_of(monkeypatch, at_once=1) as (_, _, url):
        tools = build_tools([
            SandboxToolConfig(
                backend=RemoteSandboxes(url=url, start_timeout_s=2), check="read a; grep -q x f; echo $a"
            )
        ])  # fmt: skip
        episode = EpisodeTools(Task(task_id="t", prompt="x"))
        try:
            await episode.call(tools["shell"], {"command": "echo x > f"})
            assert await episode.examined(tools.values()) == {"sandbox_check": True}
        finally:
            await episode.close()
            await tools["shell"].close()


async def test_wrong_requests_are_refused_and_named(monkeypatch):
    async with server_of(monkeypatch) as (_, backend, url):
        named = {"Authorization": "Bearer secret"}
        sandbox = await backend.start(None, SandboxLimits())
        async with aiohttp.ClientSession() as http:
            for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "secret"}):
                for path in ("/sandboxes", f"{sandbox._path}/commands"):
                    async with http.post(url + path, json={}, headers=headers) as answer:
                        assert answer.status == 401
            for body in ({}, {"words": 1}, {"words": ["x"], "timeout_s": "soon"}, []):
                async with http.post(f"{url}{sandbox._path}/commands", json=body, headers=named) as answer:
                    assert (answer.status, "no command" in (await answer.json())["error"]) == (400, True)
        with pytest.raises(ToolError, match="starts no sandbox: image='python:3'"):
            await backend.start("python:3", SandboxLimits())
        monkeypatch.setenv(TOKEN, "wrong")
        other = RemoteBackend(RemoteSandboxes(url=url))
        with pytest.raises(ToolError, match="the token is missing or wrong"):
            await other.start(None, SandboxLimits())
    with pytest.raises(ToolError, match="does not answer"):
        await other.start(None, SandboxLimits())
    await other.close()
    monkeypatch.delenv(TOKEN)
    with pytest.raises(ConfigError, match="SLUICE_SANDBOX_TOKEN holds no token"):
        RemoteBackend(RemoteSandboxes(url="http://127.0.0.1:1"))
    with pytest.raises(ConfigError, match="set the variable SLUICE_SANDBOX_TOKEN"):
        SandboxServer(SandboxServerConfig())
    with pytest.raises(ValueError, match=r"backend\.type=http: .* give actors that server.s url"):
        SandboxServerConfig(backend=RemoteSandboxes(url="http://far:1"))
    with pytest.raises(ValueError, match="profiles"):  # images and limits come with each request
        SandboxServerConfig(profiles={"big": {"memory_mb": 2048}})
