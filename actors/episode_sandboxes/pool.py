"""The sandboxes of an actor: so many at a time, some of them started ahead."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import structlog

from actors.episode_sandboxes.base import EpisodeSandbox, SandboxBackend
from actors.episode_sandboxes.host_budget import HostBudget
from actors.episodes.errors import ToolError
from actors.episodes.task import Task
from actors.settings.episode_sandboxes import PROFILE, EpisodeSandboxes, HostSandboxes, SandboxLimits
from bus.waiting import cancelled, retrieve_exception

log = structlog.get_logger()
END_TIMEOUT_S = 10.0
"""Longest time for which the end of an actor waits for that of its sandboxes."""


class SandboxPool:
    """Gives each episode a sandbox of its own, once there is room for it."""

    def __init__(
        self, backend: SandboxBackend, config: HostSandboxes, *, at_once: int,
        gateway: Callable[[], str | None] = lambda: None,
    ) -> None:  # fmt: skip
        self._backend = backend
        self._gateway = gateway
        """Returns the address of the server that sandboxes reach."""
        self._config = config
        self._budget = HostBudget(config.host_budget)
        self._places = asyncio.Semaphore(at_once)
        self._ready: deque[EpisodeSandbox] = deque()
        self._filling: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @asynccontextmanager
    async def sandbox(
        self, image: str | None = None, limits: SandboxLimits | None = None, gateway: str | None = None
    ) -> AsyncIterator[EpisodeSandbox]:
        """Have a sandbox while inside, of the settings' image, limits and gateway unless others are named.
        Raises ToolError."""
        async with self._places:
            is_usual = image is None and limits is None and gateway is None
            sandbox = self._ready.popleft() if self._ready and is_usual else None
            self._fill()
            sandbox = sandbox or await self._started(
                image, limits or self._config, gateway or self._gateway()
            )
            try:
                yield sandbox
            finally:
                await self._ended(sandbox)

    def wish_of(self, task: Task) -> tuple[str | None, SandboxLimits | None]:
        """Return image and limits of a task's sandbox, each None where they are the settings'. Raises
        ToolError for a profile that these do not have."""
        assert isinstance(self._config, EpisodeSandboxes), "a server of sandboxes knows of no tasks"
        if problem := self._config.refused_profile(task.metadata):
            raise ToolError(f"task {task.task_id}: {problem}")
        image, profile = task.metadata.get("sandbox_image"), task.metadata.get(PROFILE)
        own = image if isinstance(image, str) else None
        if profile is None:
            return own, None
        return own or self._config.profiles[str(profile)].image, self._config.limits(str(profile))

    @asynccontextmanager
    async def further(
        self, image: str | None, limits: SandboxLimits | None = None
    ) -> AsyncIterator[EpisodeSandbox]:
        """Have another sandbox while inside, for who has closed the one that it had. Raises ToolError."""
        sandbox = await self._started(image, limits or self._config, None)
        try:
            yield sandbox
        finally:
            await self._ended(sandbox)

    async def close(self) -> None:
        self._is_closed = True
        if self._filling is not None:
            await cancelled(self._filling)
        while self._ready:
            await self._ready.popleft().close()
        if self._ending:
            await asyncio.wait(self._ending, timeout=END_TIMEOUT_S)
        await self._backend.close()
        self._budget.close()

    async def _started(self, image: str | None, limits: SandboxLimits, gateway: str | None) -> EpisodeSandbox:
        async with AsyncExitStack() as room:
            await room.enter_async_context(self._budget.room(limits))
            return EpisodeSandbox(await self._backend.start(image, limits, gateway), limits, room.pop_all())

    async def _ended(self, sandbox: EpisodeSandbox) -> None:
        ending = asyncio.create_task(sandbox.close(), name="end of a sandbox")
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        ending.add_done_callback(retrieve_exception)
        await asyncio.shield(ending)

    def _fill(self) -> None:
        if self._config.warm and not self._is_closed and (self._filling is None or self._filling.done()):
            self._filling = asyncio.create_task(self._start_ahead(), name="warm sandboxes")

    async def _start_ahead(self) -> None:
        while len(self._ready) < self._config.warm and not self._is_closed:
            try:
                self._ready.append(await self._started(None, self._config, self._gateway()))
            except ToolError as error:  # an episode that needs one meets the same
                log.warning("no_sandbox_ahead", reason=str(error))
                return
