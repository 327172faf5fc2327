"""Sandboxes of services: what all of them share, with a service whose sandboxes are in namespaces."""

import asyncio
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from actors.episode_sandboxes import hosted, hosted_commands
from actors.episode_sandboxes.base import Command, EpisodeSandbox
from actors.episode_sandboxes.build import build_backend
from actors.episode_sandboxes.hosted import HostedBackend, WayOut
from actors.episode_sandboxes.namespaces import NamespaceBackend
from actors.episodes.errors import ToolError, ToolFailedError
from actors.sandboxes import owner
from actors.settings.episode_sandboxes import (
    ContainerSandboxes,
    HostedSandboxes,
    KubernetesSandboxes,
    NamespaceSandboxes,
    SandboxLimits,
)
from bus.errors import ConfigError
from tests.actors.episode_sandboxes.backends import said
from tests.actors.episode_sandboxes.protocol import does_what_a_sandbox_does


class Sandbox:
    """A sandbox of the service."""

    def __init__(self, service, running):
        self.service, self.running = service, running

    async def shell(self, script, timeout_s):
        return (await self.ran(("/bin/sh", "-c", script), timeout_s=timeout_s)).decode()

    async def put(self, path, data):
        await self.ran(("/bin/sh", "-c", 'mkdir -p "$(dirname "$0")"; cat > "$0"', path), stdin=data)

    async def get(self, path):
        return await self.ran(("/bin/cat", path))

    async def ran(self, words, **settings):
        if self not in self.service.sandboxes:
            raise ToolFailedError("the sandbox has ended")
        self.service.asked += 1
        settings = {"timeout_s": 60.0, "output_bytes": 1 << 24, **settings}
        return (await self.running.run(Command(words=words, directory="/", **settings))).stdout

    async def end(self):
        if self.service.fails:
            raise self.service.fails.pop()
        self.service.sandboxes.pop(self, None)
        await self.running.close()


class Service:
    """A service whose sandboxes are in namespaces of this host."""

    def __init__(self):
        self.namespaces = NamespaceBackend.from_config(NamespaceSandboxes())
        self.sandboxes, self.asked, self.answers = {}, 0, asyncio.Event()
        self.answers.set()
        self.fails = []
        """Errors of the next requests to end a sandbox."""

    async def start(self, image, limits, owner, way_out):
        self.way_out = way_out
        if image == "nosuchimage":
            raise ToolFailedError("the image was not found")
        sandbox = Sandbox(self, await self.namespaces.start(None, limits))
        self.sandboxes[sandbox] = owner
        await self.answers.wait()
        return sandbox

    async def owned(self):
        for sandbox, label in list(self.sandboxes.items()):
            yield label, sandbox

    async def close(self):
        await self.namespaces.close()


@asynccontextmanager
async def backend_of(**settings):
    service = Service()
    backend = HostedBackend(HostedSandboxes(type="modal", image="tiny:1", **settings), service)
    try:
        yield backend, service
    finally:
        await backend.close()


async def test_a_sandbox_of_a_service_does_what_a_near_one_does(monkeypatch):
    async with backend_of() as (backend, service):
        sandbox = EpisodeSandbox(await backend.start(None, SandboxLimits(cpu_s=77, disk_mb=8)))
        await does_what_a_sandbox_does(sandbox)
        assert await said(sandbox, "ulimit -t") == "77\n"
        assert await said(sandbox, "ls -d /tmp/.sluice* | wc -l") == "1\n"  # its own
        before = service.asked
        await said(sandbox, "true")
        assert service.asked == before + 1
        monkeypatch.setattr(hosted_commands, "WAIT_S", 0.2)
        assert await said(sandbox, "sleep 0.7; echo late") == "late\n"
        await sandbox.close()
        with pytest.raises(ToolFailedError, match="has ended"):
            await said(sandbox, "true")


async def test_what_an_actor_left_is_ended_by_the_next_one_of_its_host():
    told = "from actors.sandboxes import owner; print(owner.this_process())"
    gone = (await asyncio.to_thread(subprocess.check_output, [sys.executable, "-c", told], text=True)).strip()
    async with backend_of() as (backend, service):
        others = ("0123456789abcdef-1", "[1.5, 7, 2.5]")  # of another host, and of another program
        left = [await service.start("tiny:1", SandboxLimits(), one, WayOut()) for one in (gone, *others)]
        ours = await service.start("tiny:1", SandboxLimits(), owner.this_process(), WayOut())
        await backend.start(None, SandboxLimits())
        assert left[0] not in service.sandboxes
        assert {*left[1:], ours} < set(service.sandboxes)


async def test_what_a_service_has_started_is_ended_where_nobody_waits_for_it_any_more(monkeypatch):
    monkeypatch.setattr(hosted, "END_TIMEOUT_S", 0.1)
    async with backend_of(start_timeout_s=1.0) as (backend, service):
        service.answers.clear()
        with pytest.raises(ToolError, match=r"modal has started no sandbox after 1 s"):
            await backend.start(None, SandboxLimits())
    assert len(service.sandboxes) == 1  # the service never said so
    async with backend_of() as (backend, service):
        service.answers.clear()
        starting = asyncio.create_task(backend.start(None, SandboxLimits()))
        async with asyncio.timeout(30):
            while not service.sandboxes:  # noqa: ASYNC110 - the service has no event for it
                await asyncio.sleep(0.01)
        starting.cancel()
        await asyncio.wait([starting])
        assert starting.cancelled()
        monkeypatch.setattr(hosted, "END_TIMEOUT_S", 20)
        service.answers.set()
    assert service.sandboxes == {}


async def test_a_service_that_does_not_end_a_sandbox_is_asked_again(monkeypatch):
    monkeypatch.setattr(hosted_commands, "AGAIN_S", 0.01)
    async with backend_of() as (backend, service):
        sandbox = await backend.start(None, SandboxLimits())
        service.fails = [ToolError("away")] * 2
        await sandbox.close()
        assert service.sandboxes == {}
        sandbox = await backend.start(None, SandboxLimits())
        service.fails = [ToolFailedError("it has ended")]
        await sandbox.close()
        assert service.fails == []


async def test_who_ends_the_script_that_watches_its_command_has_failed_itself(monkeypatch):
    monkeypatch.setattr(hosted_commands, "WAIT_S", 0.5)
    async with backend_of() as (backend, service):
        sandbox = EpisodeSandbox(await backend.start(None, SandboxLimits()))
        ends = (
            "rm -r /tmp/.sluice-*; sleep 100",
            "kill -9 $(cat /tmp/.sluice-*/run); sleep 100",
            "for one in /tmp/.sluice-*; do mkdir $one/done.new; done",
        )
        for script in ends:
            before = service.asked
            with pytest.raises(ToolFailedError, match="has stopped the script that watches a command"):
                await said(sandbox, script, timeout_s=300)
            assert service.asked < before + 9


async def test_a_start_that_fails_is_no_fault_of_an_episode_and_leaves_nothing(monkeypatch):
    async with backend_of() as (backend, _):
        with pytest.raises(ToolError, match="the image was not found") as told:
            await backend.start("nosuchimage", SandboxLimits())
        assert not isinstance(told.value, ToolFailedError)
    async with backend_of() as (backend, service):
        monkeypatch.setattr(hosted_commands, "NEEDED", ("tar", "nosuchprogram"))
        with pytest.raises(ToolError, match="the image of a sandbox lacks nosuchprogram"):
            await backend.start(None, SandboxLimits())
    assert service.sandboxes == {}


async def test_a_sandbox_is_let_out_to_the_host_of_the_gateway_alone_and_the_log_says_that_ports_are_open():
    with capture_logs() as logs:
        await is_let_out_to_hosts_alone()
    [told] = [one for one in logs if one["event"] == "sandboxes_reach_all_ports"]
    assert (told["service"], told["of"]) == ("modal", "https://gate.example/x")


async def is_let_out_to_hosts_alone():
    async with backend_of() as (backend, service):
        ways = {
            "https://gate.example/x": ((), ("gate.example",)),
            "http://192.0.2.7:81": (("192.0.2.7/32",), ()),
        }
        for gateway, (networks, names) in ways.items():
            sandbox = await backend.start(None, SandboxLimits(), gateway)
            assert service.way_out == WayOut(networks, names)
            assert await sandbox.reach(gateway) == (gateway, None)
        await backend.start(None, SandboxLimits())
        assert service.way_out.is_closed
        with pytest.raises(ToolError, match="'gate' is no address of a server"):
            await backend.start(None, SandboxLimits(), "gate")


@pytest.mark.parametrize("config", [ContainerSandboxes, KubernetesSandboxes, HostedSandboxes])
def test_a_life_that_would_be_cut_to_nothing_is_refused(config):
    kind = {"type": "e2b"} if config is HostedSandboxes else {}
    with pytest.raises(ValueError, match=r"life_s\n.*greater than or equal to 1"):
        config(image="tiny:1", life_s=0.9, **kind)


def test_a_service_whose_package_is_missing_is_a_config_error(monkeypatch):
    for name in ("e2b", "modal", "daytona"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ConfigError, match=rf"pip install 'sluice-rl\[{name}\]'"):
            build_backend(HostedSandboxes(type=name, image="tiny:1"))
