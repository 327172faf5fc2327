"""Sandboxes in namespaces, as the servers of tests lend them."""

import secrets

from actors.episode_sandboxes.base import Command
from actors.episode_sandboxes.namespaces import NamespaceBackend
from actors.settings.episode_sandboxes import NamespaceSandboxes, SandboxLimits


class Places:
    """The sandboxes of a service by their names, and what they were asked to be."""

    def __init__(self):
        self.namespaces = NamespaceBackend.from_config(NamespaceSandboxes())
        self.running, self.described = {}, {}

    async def started(self, described):
        name = "sb-" + secrets.token_hex(8)
        self.running[name] = await self.namespaces.start(None, SandboxLimits())
        self.described[name] = described
        return name

    async def ended(self, name):
        if (sandbox := self.running.pop(name, None)) is None:
            return False
        del self.described[name]
        await sandbox.close()
        return True

    async def ran(self, sandbox, words, stdin=b""):
        command = Command(words=words, stdin=stdin, timeout_s=90.0, output_bytes=1 << 24, directory="/")
        return await sandbox.run(command)

    async def written(self, sandbox, path, data):
        await self.ran(sandbox, ("/bin/sh", "-c", 'mkdir -p "$(dirname "$0")"; cat > "$0"', path), data)

    async def close(self):
        for name in list(self.running):
            await self.ended(name)
        await self.namespaces.close()
