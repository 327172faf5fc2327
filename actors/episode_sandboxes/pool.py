"""The sandboxes of an actor: so many at a time, some of them started ahead."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from actors.episode_sandboxes.base import EpisodeSandbox, RunningSandbox, SandboxBackend
from actors.episodes.errors import ToolError
from actors.settings.episode_sandboxes import SandboxLimits

log = structlog.get_logger()


class SandboxPool:
    """Gives each episode a sandbox of its own, once there is room for it."""

    def __init__(self, backend: SandboxBackend, limits: SandboxLimits, *, at_once: int, warm: int) -> None:
        self._backend = backend
        self._limits = limits
        self._places = asyncio.Semaphore(at_once)
        self._warm = warm
        self._ready: deque[RunningSandbox] = deque()
        self._filling: asyncio.Task[None] | None = None
        self._is_closed = False

    @asynccontextmanager
    async def sandbox(
        self, image: str | None = None, limits: SandboxLimits | None = None
    ) -> AsyncIterator[EpisodeSandbox]:
        """Have a sandbox while inside, of the settings' image and limits unless others are named.

        Raises ToolError."""
        limits = limits or self._limits
        async with self._places:
            is_usual = image is None and limits == self._limits
            running = self._ready.popleft() if self._ready and is_usual else None
            self._fill()
            sandbox = EpisodeSandbox(running or await self._backend.start(image, limits))
            try:
                yield sandbox
            finally:
                await sandbox.close()

    @asynccontextmanager
    async def further(self, image: str | None) -> AsyncIterator[EpisodeSandbox]:
        """Have another sandbox while inside, for who has one: it waits for none. Raises ToolError."""
        sandbox = EpisodeSandbox(await self._backend.start(image, self._limits))
        try:
            yield sandbox
        finally:
            await sandbox.close()

    async def close(self) -> None:
        """End the sandboxes that wait, and the back end."""
        self._is_closed = True
        if self._filling is not None:
            await asyncio.wait([self._filling])
        while self._ready:
            await self._ready.popleft().close()
        await self._backend.close()

    def _fill(self) -> None:
        if self._warm and not self._is_closed and (self._filling is None or self._filling.done()):
            self._filling = asyncio.create_task(self._start_ahead(), name="warm sandboxes")

    async def _start_ahead(self) -> None:
        while len(self._ready) < self._warm and not self._is_closed:
            try:
                self._ready.append(await self._backend.start(None, self._limits))
            except ToolError as error:  # an episode that needs one meets the same
                log.warning("no_sandbox_ahead", reason=str(error))
                return
