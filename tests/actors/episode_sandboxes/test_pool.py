"""How many sandboxes there are at a time, and which are started ahead."""

import asyncio
import subprocess
import sys
import tempfile

import pytest

from actors.episode_sandboxes.base import SandboxBackend
from actors.episode_sandboxes.host_budget import HostBudget
from actors.episode_sandboxes.namespaces import NamespaceBackend
from actors.episode_sandboxes.pool import SandboxPool
from actors.episodes.errors import ToolError
from actors.settings.episode_sandboxes import (
    HostBudgetConfig,
    HostSandboxes,
    NamespaceSandboxes,
    SandboxLimits,
)
from tests.actors.episode_sandboxes.backends import said


class Counted:
    """A back end of which is known what runs."""

    def __init__(self, backend: SandboxBackend):
        self._backend = backend
        self.running = []
        self.most = 0

    async def start(self, image, limits, gateway=None):
        sandbox = await self._backend.start(image, limits)
        self.running.append(sandbox)
        self.most = max(self.most, len(self.running))
        end = sandbox.close

        async def close():
            if sandbox in self.running:
                self.running.remove(sandbox)
            await end()

        sandbox.close = close
        return sandbox

    async def close(self):
        assert not self.running
        await self._backend.close()


async def test_an_actor_has_so_many_sandboxes_at_a_time_and_some_ahead():
    backend = Counted(NamespaceBackend.from_config(NamespaceSandboxes()))
    pool = SandboxPool(backend, HostSandboxes(warm=1), at_once=2)
    together = asyncio.Barrier(2)

    async def episode(number):
        async with pool.sandbox() as sandbox:
            await together.wait()
            return await said(sandbox, f"ls; echo {number} > f; cat f")

    assert await asyncio.gather(*map(episode, range(6))) == [f"{n}\n" for n in range(6)]
    assert backend.most <= 3
    await pool._filling
    [ahead] = [one.running for one in pool._ready]
    async with pool.sandbox() as sandbox:
        assert sandbox.running is ahead
    await pool.close()
    assert backend.running == []


async def test_a_sandbox_is_ended_also_where_its_caller_does_not_wait_for_a_slow_end():
    backend = Counted(NamespaceBackend.from_config(NamespaceSandboxes()))
    pool = SandboxPool(backend, HostSandboxes(), at_once=1)
    has_begun, ends, goes_on = (asyncio.Event() for _ in range(3))

    async def episode():
        async with pool.sandbox() as sandbox:
            end = sandbox.running.close

            async def slowly():
                ends.set()
                await goes_on.wait()
                await end()

            sandbox.running.close = slowly
            has_begun.set()
            await asyncio.sleep(600)

    playing = asyncio.create_task(episode())
    async with asyncio.timeout(60):
        await has_begun.wait()
        for _ in range(2):  # as `bus.waiting.cancelled` does after a second
            playing.cancel()
            await ends.wait()
        await asyncio.wait([playing])
        goes_on.set()
        await pool.close()
    assert backend.running == []


HOLD = """
import asyncio
from actors.episode_sandboxes.host_budget import HostBudget
from actors.settings.episode_sandboxes import HostBudgetConfig, SandboxLimits
async def main():
    async with HostBudget(HostBudgetConfig(memory_mb=4000)).room(SandboxLimits(memory_mb=1000)):
        print("held", flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_sandboxes_of_all_actors_of_a_host_share_its_memory(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    other = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE)  # noqa: ASYNC220
    backend = Counted(NamespaceBackend.from_config(NamespaceSandboxes()))
    host = {"memory_mb": 2000, "disk_mb": 10000, "wait_s": 0.3}
    pool = SandboxPool(backend, HostSandboxes(memory_mb=1000, host_budget=host), at_once=9)
    try:
        assert await asyncio.to_thread(other.stdout.readline) == b"held\n"
        async with pool.sandbox() as first:
            with pytest.raises(ToolError, match=r"no room for a sandbox for 0\.3 s"):
                async with pool.sandbox():
                    pass
            await first.close()  # a check comes after it, in its place
            async with pool.further(None):
                pass
            other.kill()
            await asyncio.to_thread(other.wait)
            async with pool.sandbox(), pool.sandbox():  # what a killed actor had is free
                assert len(backend.running) == 2
        assert len(list(tmp_path.rglob("actor-*"))) == 1
    finally:
        other.kill()
        other.stdout.close()
        await pool.close()


async def test_sandboxes_of_all_actors_of_a_host_share_its_processors(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    one, other = (HostBudget(HostBudgetConfig(cpus=2, wait_s=0.1)) for _ in range(2))
    async with one.room(SandboxLimits(cpus=1.5)), other.room(SandboxLimits(cpus=0.5)):
        with pytest.raises(ToolError, match="no room for a sandbox"):
            async with other.room(SandboxLimits(cpus=0.01)):
                pass
    async with other.room(SandboxLimits(cpus=2)):
        pass
    one.close()
    other.close()


def test_a_budget_in_which_no_sandbox_finds_room_is_refused():
    with pytest.raises(ValueError, match=r"disk_mb=256 of a sandbox exceeds host_budget\.disk_mb=100"):
        HostSandboxes(host_budget={"disk_mb": 100})
    with pytest.raises(ValueError, match=r"cpus=1\.0 of a sandbox exceeds host_budget\.cpus=0\.5"):
        HostSandboxes(host_budget={"cpus": 0.5})
