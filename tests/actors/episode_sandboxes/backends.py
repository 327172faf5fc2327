"""Sandboxes of tests, and commands in them."""

from contextlib import asynccontextmanager

from actors.episode_sandboxes.base import Command, EpisodeSandbox
from actors.episode_sandboxes.namespaces import NamespaceBackend
from actors.settings.episode_sandboxes import NamespaceSandboxes, SandboxLimits


@asynccontextmanager
async def sandbox_of(readable=(), **limits):
    """A sandbox in namespaces."""
    backend = NamespaceBackend.from_config(NamespaceSandboxes(readable=readable))
    try:
        sandbox = EpisodeSandbox(await backend.start(None, SandboxLimits(**limits)))
        try:
            yield sandbox
        finally:
            await sandbox.close()
    finally:
        await backend.close()


async def shell(sandbox, script, *, timeout_s=20.0, **settings):
    """What a script of a shell did."""
    return await sandbox.run(Command(words=("/bin/sh", "-c", script), timeout_s=timeout_s, **settings))


async def said(sandbox, script, **settings):
    """What a script wrote, which ended well."""
    ran = await shell(sandbox, script, **settings)
    if (ran.end, ran.status) != ("exited", 0):
        raise AssertionError(ran)
    return ran.stdout.decode()
