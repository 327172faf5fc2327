"""Starts sandboxes of a service, and ends those that actors of this host have left there."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Protocol

import structlog

from actors.episode_sandboxes.base import host_and_port
from actors.episode_sandboxes.hosted_commands import HostedSandbox, ScriptedSandbox, end_sandbox
from actors.episodes.errors import ToolError, ToolFailedError
from actors.sandboxes.owner import is_orphan, this_process
from actors.settings.episode_sandboxes import HostedSandboxes, SandboxLimits
from bus.waiting import cancelled, retrieve_exception

log = structlog.get_logger()
Errors = tuple[type[Exception], ...]
END_TIMEOUT_S = 10.0
"""Longest time for which the end of an actor waits for that of sandboxes whose start nobody waits for."""


@dataclass(frozen=True, slots=True)
class WayOut:
    """What a sandbox may reach, by networks or by names; nothing where both are empty."""

    networks: Sequence[str] = ()
    names: Sequence[str] = ()

    @property
    def is_closed(self) -> bool:
        return not (self.networks or self.names)


class HostedService(Protocol):
    """What the package of a service does. Its errors are those of `told`."""

    async def start(self, image: str, limits: SandboxLimits, owner: str, way_out: WayOut) -> HostedSandbox:
        """Start a sandbox with the label `owner`. The service ends it after its longest life."""

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
        self._has_told = False
        """Whether the log says what sandboxes reach."""
        self._ending: set[asyncio.Task[None]] = set()
        """Starts that nobody waits for any more: the service may well have made their sandboxes."""

    async def start(
        self, image: str | None, limits: SandboxLimits, gateway: str | None = None
    ) -> ScriptedSandbox:
        if gateway is not None and not self._has_told:
            self._has_told = True
            log.warning(
                "sandboxes_reach_all_ports", service=self._config.type, of=gateway,
                reason="services let connections out to hosts, not to ports",
                remedy="run nothing else on the host of gateway.advertise, or close its other ports",
            )  # fmt: skip
        try:
            return await self._started(image or self._config.image, limits, _way_out(gateway))
        except TimeoutError as error:
            within_s = self._config.start_timeout_s
            raise ToolError(f"{self._config.type} has started no sandbox after {within_s:g} s") from error
        except ToolFailedError as error:  # nothing of an episode has run in it
            raise ToolError(str(error)) from error

    async def close(self) -> None:
        if self._ending:
            await asyncio.wait(self._ending, timeout=END_TIMEOUT_S)
        for task in list(self._ending):
            log.warning("sandbox_may_be_left", service=self._config.type, life_s=self._config.life_s)
            await cancelled(task)
        await self._service.close()

    async def _started(self, image: str, limits: SandboxLimits, way_out: WayOut) -> ScriptedSandbox:
        within_s = self._config.start_timeout_s
        async with self._looking, asyncio.timeout(within_s):
            if not self._has_looked:
                await self._remove_orphans()
                self._has_looked = True
        asking = asyncio.ensure_future(self._service.start(image, limits, this_process(), way_out))
        try:
            async with asyncio.timeout(within_s):
                sandbox = ScriptedSandbox(await asyncio.shield(asking), limits)
                await sandbox.begin()
        except BaseException:  # a cancelled start leaves nothing either
            ending = asyncio.create_task(_end_when_started(asking), name="end of a sandbox")
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            ending.add_done_callback(retrieve_exception)
            raise
        return sandbox

    async def _remove_orphans(self) -> None:
        async for owner, hosted in self._service.owned():
            if is_orphan(owner):
                log.info("orphaned_sandbox_removed", service=self._config.type)
                await end_sandbox(hosted)


async def _end_when_started(asking: asyncio.Future[HostedSandbox]) -> None:
    try:
        hosted = await asking
    except ToolError:  # there is none
        return
    await end_sandbox(hosted)


def _way_out(gateway: str | None) -> WayOut:
    """Return the way to a gateway alone. Raises ToolError for what is no address."""
    if gateway is None:
        return WayOut()
    try:
        host, _ = host_and_port(gateway)
    except ValueError as error:
        raise ToolError(f"the gateway cannot be reached: {error}") from error
    try:
        return WayOut(networks=(str(ip_network(host)),))
    except ValueError:  # a name
        return WayOut(names=(host,))


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
