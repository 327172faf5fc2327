"""How many sandboxes there are at a time, and which are started ahead."""

import asyncio

from actors.episode_sandboxes.base import SandboxBackend
from actors.episode_sandboxes.namespaces import NamespaceBackend
from actors.episode_sandboxes.pool import SandboxPool
from actors.settings.episode_sandboxes import NamespaceSandboxes, SandboxLimits
from tests.actors.episode_sandboxes.backends import said


class Counted:
    """A back end of which is known what runs."""

    def __init__(self, backend: SandboxBackend):
        self._backend = backend
        self.running = []
        self.most = 0

    async def start(self, image, limits):
        sandbox = await self._backend.start(image, limits)
        self.running.append(sandbox)
        self.most = max(self.most, len(self.running))
        end = sandbox.close

        async def close():
            self.running.remove(sandbox)
            await end()

        sandbox.close = close
        return sandbox

    async def close(self):
        assert not self.running
        await self._backend.close()


async def test_an_actor_has_so_many_sandboxes_at_a_time_and_some_ahead():
    backend = Counted(NamespaceBackend.from_config(NamespaceSandboxes()))
    pool = SandboxPool(backend, SandboxLimits(), at_once=2, warm=1)
    together = asyncio.Barrier(2)

    async def episode(number):
        async with pool.sandbox() as sandbox:
            await together.wait()
            return await said(sandbox, f"ls; echo {number} > f; cat f")

    assert await asyncio.gather(*map(episode, range(6))) == [f"{n}\n" for n in range(6)]
    assert backend.most <= 3
    await pool._filling
    [ahead] = backend.running
    async with pool.sandbox() as sandbox:
        assert sandbox.running is ahead
    await pool.close()
    assert backend.running == []
