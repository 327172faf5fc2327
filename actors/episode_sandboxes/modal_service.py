"""Sandboxes of Modal, by its package `modal`, which reads its keys from MODAL_TOKEN_ID and
MODAL_TOKEN_SECRET."""

from collections.abc import AsyncIterator
from functools import partial

import modal
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError
from modal import exception

from actors.episode_sandboxes.hosted import WayOut, told
from actors.episode_sandboxes.hosted_commands import HostedSandbox
from actors.sandboxes.owner import OWNER
from actors.settings.episode_sandboxes import HostedSandboxes, SandboxLimits

WRITE = 'mkdir -p "$(dirname "$0")" && cat > "$0"'
failures = partial(
    told,
    "modal",
    ended=(exception.SandboxTerminatedError, exception.SandboxTimeoutError, exception.NotFoundError),
    other=(exception.Error, GRPCError, ProtocolError, StreamTerminatedError),
)


class ModalSandbox:
    """One sandbox of Modal."""

    def __init__(self, sandbox: modal.Sandbox) -> None:
        self._sandbox = sandbox

    async def shell(self, script: str, timeout_s: float) -> str:
        return (await self._run("/bin/sh", "-c", script, timeout_s=timeout_s)).decode(errors="replace")

    async def put(self, path: str, data: bytes) -> None:
        await self._run("/bin/sh", "-c", WRITE, path, stdin=data)

    async def get(self, path: str) -> bytes:
        return await self._run("/bin/cat", path)

    async def end(self) -> None:
        with failures():
            await self._sandbox.terminate.aio()

    async def _run(self, *words: str, stdin: bytes = b"", timeout_s: float = 600.0) -> bytes:
        with failures():
            process = await self._sandbox.exec.aio(*words, text=False, timeout=int(timeout_s))
            if stdin:
                process.stdin.write(stdin)
            process.stdin.write_eof()
            await process.stdin.drain.aio()
            output = await process.stdout.read.aio()
            await process.wait.aio()
        return bytes(output)


class ModalService:
    """Starts sandboxes of Modal."""

    def __init__(self, config: HostedSandboxes) -> None:
        self._config = config

    async def start(self, image: str, limits: SandboxLimits, owner: str, way_out: WayOut) -> HostedSandbox:
        with failures():
            sandbox = await modal.Sandbox.create.aio(
                app=await self._app(),
                image=modal.Image.from_registry(image),
                timeout=int(self._config.life_s),
                cpu=(limits.cpus, limits.cpus),
                memory=(limits.memory_mb, limits.memory_mb),
                block_network=way_out.is_closed,
                outbound_cidr_allowlist=None if way_out.is_closed else way_out.networks,
                outbound_domain_allowlist=way_out.names or None,
                tags={OWNER: owner},
            )
        return ModalSandbox(sandbox)

    async def owned(self) -> AsyncIterator[tuple[str, HostedSandbox]]:
        with failures():
            async for sandbox in modal.Sandbox.list.aio(app_id=(await self._app()).app_id):
                if owner := (await sandbox.get_tags.aio()).get(OWNER):
                    yield owner, ModalSandbox(sandbox)

    async def close(self) -> None:
        """Do nothing: the package keeps its connections for the process."""

    async def _app(self) -> modal.App:
        return await modal.App.lookup.aio(self._config.app, create_if_missing=True)
