"""Sandboxes of Daytona, by its package `daytona`, which reads its key from DAYTONA_API_KEY."""

from collections.abc import AsyncIterator
from functools import partial
from math import ceil
from pathlib import PurePosixPath
from shlex import quote

from daytona import AsyncDaytona, AsyncSandbox, CreateSandboxFromImageParams, Resources
from daytona.common.errors import DaytonaError, DaytonaGoneError, DaytonaNotFoundError

from actors.episode_sandboxes.hosted import WayOut, told
from actors.episode_sandboxes.hosted_commands import HostedSandbox
from actors.sandboxes.owner import OWNER
from actors.settings.episode_sandboxes import HostedSandboxes, SandboxLimits

failures = partial(told, "daytona", ended=(DaytonaNotFoundError, DaytonaGoneError), other=(DaytonaError,))


class DaytonaSandbox:
    """One sandbox of Daytona."""

    def __init__(self, sandbox: AsyncSandbox) -> None:
        self._sandbox = sandbox

    async def shell(self, script: str, timeout_s: float) -> str:
        with failures():
            return str((await self._sandbox.process.exec(script, timeout=int(timeout_s))).result)

    async def put(self, path: str, data: bytes) -> None:
        await self.shell(f"mkdir -p {quote(str(PurePosixPath(path).parent))}", 60.0)
        with failures():
            await self._sandbox.fs.upload_file(data, path)

    async def get(self, path: str) -> bytes:
        with failures():
            return bytes(await self._sandbox.fs.download_file(path))

    async def end(self) -> None:
        with failures():
            await self._sandbox.delete()


class DaytonaService:
    """Starts sandboxes of Daytona."""

    def __init__(self, config: HostedSandboxes) -> None:
        self._config = config
        self._client: AsyncDaytona | None = None

    async def start(self, image: str, limits: SandboxLimits, owner: str, way_out: WayOut) -> HostedSandbox:
        wish = CreateSandboxFromImageParams(
            image=image,
            resources=Resources(
                cpu=ceil(limits.cpus), memory=ceil(limits.memory_mb / 1024), disk=ceil(limits.disk_mb / 1024)
            ),
            labels={OWNER: owner},
            network_block_all=way_out.is_closed,
            network_allow_list=",".join(way_out.networks) or None,
            domain_allow_list=",".join(way_out.names) or None,
            ephemeral=True,
            auto_stop_interval=0,
            ttl_minutes=ceil(self._config.life_s / 60),
        )
        with failures():
            # without a limit: the package would leave what it has begun, and who waits has one
            sandbox = await self._asked().create(wish, timeout=0)
        return DaytonaSandbox(sandbox)

    async def owned(self) -> AsyncIterator[tuple[str, HostedSandbox]]:
        with failures():
            async for sandbox in self._asked().list():
                if owner := sandbox.labels.get(OWNER):
                    yield owner, DaytonaSandbox(sandbox)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    def _asked(self) -> AsyncDaytona:
        if self._client is None:  # the client wants a running loop
            self._client = AsyncDaytona()
        return self._client
