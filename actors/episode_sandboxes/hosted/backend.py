"""Starts sandboxes of a service, and ends those that actors of this host have left there."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Protocol

import structlog

from actors.episode_sandboxes.hosted.commands import HostedSandbox, ScriptedSandbox
from actors.episode_sandboxes.owner import is_orphan, this_process
from actors.episodes.errors import ToolError, ToolFailedError
from actors.settings.episode_sandboxes import HostedSandboxes, SandboxLimits

log = structlog.get_logger()
Errors = tuple[type[Exception], ...]


class HostedService(Protocol):
    """What the package of a service does. Its errors are those of `told`."""

    async def start(self, image: str, limits: SandboxLimits, owner: str) -> HostedSandbox:
        """Start a sandbox without network, with the label `owner`. The service ends it after its longest
        life."""

    def owned(self) -> AsyncIterator[tuple[str, HostedSandbox]]:
        """Yield the sandboxes that have a label of an owner, with it."""

    async def close(self) -> None:
        """End the connections to the service."""


class HostedBackend:
    """Starts sandboxes of a service."""

    def __init__(self, config: HostedSandboxes, service: HostedService) -> None:
        self._config = config
        self._service = service
        self._looking = asyncio.Lock()
        self._has_looked = False
        """Whether sandboxes that others have left were looked for."""

    async def start(self, image: str | None, limits: SandboxLimits) -> ScriptedSandbox:
        """Start a sandbox. Raises ToolError."""
        async with self._looking:
            if not self._has_looked:
                await self._remove_orphans()
                self._has_looked = True
        within_s = self._config.start_timeout_s
        try:
            async with asyncio.timeout(within_s):
                hosted = await self._service.start(image or self._config.image, limits, this_process())
        except TimeoutError as error:
            raise ToolError(f"{self._config.type} has started no sandbox after {within_s:g} s") from error
        sandbox = ScriptedSandbox(hosted, limits)
        try:
            await sandbox.begin()
        except BaseException:  # a cancelled start leaves nothing either
            await sandbox.close()
            raise
        return sandbox

    async def close(self) -> None:
        """End the connections to the service."""
        await self._service.close()

    async def _remove_orphans(self) -> None:
        async for owner, hosted in self._service.owned():
            if is_orphan(owner):
                log.info("orphaned_sandbox_removed", service=self._config.type)
                await hosted.end()


@contextmanager
def told(service: str, *, ended: Errors, other: Errors) -> Iterator[None]:
    """Translate the errors of a package: of a sandbox that is gone, and others."""
    failed: Errors = (*other, OSError)
    try:
        yield
    except ended as error:
        raise ToolFailedError(f"the sandbox of {service} has ended: {error}") from error
    except failed as error:
        raise ToolError(f"{service} failed: {error!r}") from error
