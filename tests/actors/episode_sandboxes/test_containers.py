"""Sandboxes in containers of real daemons, Docker's and Podman's, with an image that is made of busybox."""

import asyncio
import subprocess
import sys
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest
from structlog.testing import capture_logs

from actors.episode_sandboxes.base import Command, EpisodeSandbox, SandboxFileError
from actors.episode_sandboxes.containers import ContainerBackend
from actors.episode_sandboxes.pool import SandboxPool
from actors.episodes.errors import ToolError, ToolFailedError
from actors.settings.episode_sandboxes import ContainerSandboxes, HostSandboxes, SandboxLimits
from actors.settings.sandbox_tools import SandboxToolConfig
from actors.tools.build import build_tools
from bus.errors import ConfigError
from tests.actors.episode_sandboxes.backends import said, shell
from tests.actors.episode_sandboxes.daemons import (
    DAEMONS,
    IMAGE,
    ROOTLESS,
    ask_for_few_processes,
    daemon_of,
    started_daemon,
)
from tests.actors.tools.sandbox_episodes import Episode

pytestmark = pytest.mark.nightly
HAS_GROUPS_OF_VERSION_2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()


@pytest.fixture(scope="module", params=[kind for kind in DAEMONS if kind != ROOTLESS])
def daemon(request):
    """The socket of a daemon that has the image."""
    with daemon_of(request.param) as socket:
        yield socket


@pytest.fixture(autouse=True)
def few_processes(monkeypatch):
    ask_for_few_processes(monkeypatch.setattr)


@asynccontextmanager
async def backend_of(daemon):
    backend = ContainerBackend(ContainerSandboxes(image=IMAGE, socket=daemon))
    try:
        yield backend
    finally:
        await backend.close()


@asynccontextmanager
async def container_of(daemon, **limits):
    async with backend_of(daemon) as backend:
        sandbox = EpisodeSandbox(await backend.start(None, SandboxLimits(**limits)))
        try:
            yield sandbox
        finally:
            await sandbox.close()


async def test_a_container_does_what_a_sandbox_does(daemon):
    async with container_of(daemon, memory_mb=64, processes=32) as sandbox:
        ran = await shell(sandbox, "echo out; echo err >&2; pwd; exit 3")
        assert (ran.stdout, ran.stderr, ran.end, ran.status) == (b"out\n/workspace\n", b"err\n", "exited", 3)
        assert await said(sandbox, "sleep 100 & echo $! > pid; echo begun") == "begun\n"
        assert await said(sandbox, "kill -0 $(cat pid) && echo runs") == "runs\n"
        large = b"x" * 300_000
        assert await said(
            sandbox, "cat; echo $A", stdin=large, variables={"A": "b"}, output_bytes=400_000
        ) == (large.decode() + "b\n")
        await sandbox.write("a/b c", b"\0\xff" * 100)
        snapshot = await sandbox.snapshot()
        await said(sandbox, "rm -r a; touch .hidden d")
        await sandbox.restore(snapshot)
        assert await sandbox.read("/workspace/a/b c") == b"\0\xff" * 100
        with pytest.raises(SandboxFileError, match="No such file"):
            await sandbox.read("a/nothing")
        assert (await sandbox.run(Command(words=("no-such-program",), timeout_s=20))).status == 127


async def test_a_command_that_passes_a_limit_is_ended_and_the_container_goes_on(daemon):
    async with container_of(daemon, memory_mb=64, processes=32) as sandbox:
        ran = await shell(sandbox, "sleep 55 & sleep 56", timeout_s=0.5)
        assert ran.end == "time"
        assert await said(sandbox, "ps | grep -c 'sleep 5[56]' || true") == "0\n"
        ran = await shell(sandbox, "yes", output_bytes=1000)
        assert (ran.end, len(ran.stdout)) == ("output", 1000)
        assert await said(sandbox, "ps | grep -c 'yes$' || true") == "0\n"
        assert (await shell(sandbox, "kill -9 $$")).end == "exited"
        for _ in range(2):
            assert (await shell(sandbox, "exec awk 'BEGIN { x = \"y\"; while (1) x = x x }'")).end == "memory"
        assert (await shell(sandbox, "kill -9 $$")).end == "exited"
        task = asyncio.create_task(shell(sandbox, "echo > begun; exec sleep 77", timeout_s=300))
        while not (await shell(sandbox, "ls begun 2>/dev/null")).stdout:
            pass
        task.cancel()
        await asyncio.wait([task])
        assert await said(sandbox, "ps | grep -c 'sleep 7[7]' || true") == "0\n"


async def test_a_container_reaches_nothing_and_may_do_nothing(daemon):
    async with container_of(daemon) as sandbox:
        shown = await said(sandbox, "grep -E 'CapEff|NoNewPrivs' /proc/self/status; tail -n +3 /proc/net/dev")
        rights, _, interfaces = shown.partition("NoNewPrivs:\t1\n")
        assert rights == "CapEff:\t0000000000000000\n"
        assert {line.split(":")[0].strip() for line in interfaces.splitlines()} <= {
            "lo",
            "tunl0",
            "sit0",
            "ip6tnl0",
        }
        assert (await shell(sandbox, "mount -t tmpfs x /mnt || mknod /tmp/x b 254 0")).status != 0


async def test_a_container_that_has_ended_or_was_left_is_told_and_removed(daemon):
    async with backend_of(daemon) as backend:
        sandbox = EpisodeSandbox(await backend.start(None, SandboxLimits()))
        await backend.ask("DELETE", f"/containers/{sandbox.running.container_id}?force=1")
        with pytest.raises(ToolFailedError, match="the container has ended"):
            await said(sandbox, "true")
        await sandbox.close()
        with pytest.raises(ToolError, match="no image 'localhost:1/none:1'"):
            await backend.start("localhost:1/none:1", SandboxLimits())
        ours = EpisodeSandbox(await backend.start(None, SandboxLimits()))
        left, directory = await asyncio.to_thread(leave_a_container, daemon)
        assert is_there(directory)
        async with backend_of(daemon) as other:
            await (await other.start(None, SandboxLimits())).close()
            status, _ = await other.ask("GET", f"/containers/{left}/json")
            assert (bool(left), status) == (True, 404)  # its actor has ended without closing it
            assert not is_there(directory)
        assert await said(ours, "echo 1") == "1\n"  # and that of a living one stays
        await ours.close()


async def test_a_container_ends_with_its_actor_whatever_name_the_next_one_has(daemon):
    left, _ = await asyncio.to_thread(leave_a_container, daemon)
    async with backend_of(daemon) as backend, asyncio.timeout(30):
        connector = aiohttp.UnixConnector(str(daemon))
        backend._session = aiohttp.ClientSession("http://daemon", connector=connector)
        status = 200
        while status != 404:
            status, _ = await backend.ask("GET", f"/containers/{left}/json")


async def test_a_daemon_that_starts_again_fails_what_is_open_and_serves_what_comes_later():
    with daemon_of("docker") as socket, ExitStack() as further, capture_logs() as logs:
        pool = SandboxPool(
            ContainerBackend(ContainerSandboxes(image=IMAGE, socket=socket)), HostSandboxes(), at_once=1
        )
        async with pool.sandbox() as sandbox:
            under_way = asyncio.create_task(said(sandbox, "touch begun; sleep 300", timeout_s=300))
            while not (await shell(sandbox, "ls begun 2>/dev/null")).stdout:
                pass
            daemon = psutil.Process(int((socket.parent / "pid").read_text()))
            daemon.terminate()
            await asyncio.to_thread(psutil.wait_procs, [daemon], 60)
            with pytest.raises(ToolError):
                await under_way
        with pytest.raises(ToolError, match="does not answer"):
            async with pool.sandbox():
                pass
        further.enter_context(started_daemon("docker", socket.parent))
        async with pool.sandbox() as again:
            assert await said(again, "echo 2") == "2\n"
            listed = ("docker", "-H", f"unix://{socket}", "ps", "-aq")
            assert len((await asyncio.to_thread(subprocess.check_output, listed)).split()) == 1
        await pool.close()
    assert "container_is_not_removed" in [one["event"] for one in logs]


LEAVE = """
import asyncio, os, sys
from pathlib import Path
from actors.episode_sandboxes.containers import ContainerBackend
from actors.settings.episode_sandboxes import ContainerSandboxes, SandboxLimits
from tests.actors.episode_sandboxes.daemons import ask_for_few_processes
async def main():
    ask_for_few_processes(setattr)
    config = ContainerSandboxes(image=sys.argv[2], socket=Path(sys.argv[1]))
    backend = ContainerBackend(config)
    container = await backend.start(None, SandboxLimits(), "http://192.0.2.1")
    print(container.container_id, container.shared, flush=True)
    os._exit(9)
asyncio.run(main())
"""


def is_there(path):
    return Path(path).exists()


def leave_a_container(daemon):
    """The id and the directory of a container that a process has left behind."""
    command = [sys.executable, "-c", LEAVE, str(daemon), IMAGE]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout.split()


async def test_the_tools_work_in_a_container(daemon):
    backend = {"type": "docker", "image": IMAGE, "socket": str(daemon)}
    tools = build_tools([SandboxToolConfig(backend=backend, offers=("shell", "files"))])
    episode = Episode(tools, sandbox_files={"a.txt": "one\n"})
    try:
        assert await episode.said("shell", command="cat a.txt; cd /tmp; export A=b") == "one"
        assert await episode.said("shell", command="pwd; echo $A") == "/tmp\nb"
        assert await episode.said("edit_file", path="a.txt", old="one", new="two") == "edited"
        assert await episode.said("read_file", path="a.txt") == "two\n"
    finally:
        await episode.close()
        await tools["shell"].close()


async def test_a_daemon_of_an_ordinary_user_serves_and_missing_limits_are_told():
    with daemon_of(ROOTLESS) as socket, capture_logs() as logs:
        async with container_of(socket) as sandbox:
            assert await said(sandbox, "id -u; pwd") == "0\n/workspace\n"
            assert (await shell(sandbox, "sleep 60", timeout_s=0.5)).end == "time"
    told = [one["limits"] for one in logs if one["event"] == "sandboxes_are_not_limited"]
    assert told == ([] if HAS_GROUPS_OF_VERSION_2 else [["Memory", "PidsLimit", "CpuQuota"]])


def test_a_socket_without_a_daemon_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="no daemon listens there"):
        ContainerBackend(ContainerSandboxes(image=IMAGE, socket=tmp_path / "none"))
