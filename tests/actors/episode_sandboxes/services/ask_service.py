"""Asks a service's server for sandboxes by the service's own package, in whose environment this runs:

python tests/actors/episode_sandboxes/services/ask_service.py NAME"""

import asyncio
import os
import sys
from importlib import import_module

import pytest

from actors.episode_sandboxes.base import EpisodeSandbox
from actors.episode_sandboxes.build import build_backend
from actors.episodes.errors import ToolError, ToolFailedError
from actors.sandboxes import owner
from actors.settings.episode_sandboxes import HostedSandboxes, SandboxLimits
from tests.actors.episode_sandboxes.backends import said
from tests.actors.episode_sandboxes.protocol import does_what_a_sandbox_does


async def ask(name):
    """Use the service as the tests of other back ends do, and look at what it was asked for."""
    servers = import_module(f"tests.actors.episode_sandboxes.services.{name}_server")
    async with servers.serving() as (service, variables):
        os.environ.update(variables)
        config = HostedSandboxes(type=name, image="tiny:1", life_s=1800, start_timeout_s=60)
        backend = build_backend(config)
        sandbox = EpisodeSandbox(
            await backend.start(
                None, SandboxLimits(memory_mb=3000, disk_mb=9000, cpus=2), "http://192.0.2.7:8080"
            )
        )
        [asked] = service.described.values()
        service.check(asked)
        await does_what_a_sandbox_does(sandbox)
        orphan = await backend.start(None, SandboxLimits())
        [first, second] = service.described
        service.belongs_to(second, owner.this_process().rpartition("-")[0] + "-1")
        other = build_backend(config)
        third = await other.start(None, SandboxLimits())
        assert first in service.described
        assert second not in service.described
        await third.close()
        await other.close()
        with pytest.raises(ToolFailedError, match="has ended"):
            await said(EpisodeSandbox(orphan), "true")
        await sandbox.close()
        assert service.running == {}
        with pytest.raises(ToolError, match="no access to the template"):
            await backend.start("forbidden", SandboxLimits())
        await backend.close()
    other = build_backend(config)
    with pytest.raises(ToolError, match=f"{name} "):  # nobody listens there any more
        await other.start(None, SandboxLimits())
    await other.close()
    sys.stdout.write(f"asked {name}\n")


if __name__ == "__main__":
    asyncio.run(ask(sys.argv[1]))
