"""Looks at the health of one SGLang server, now and then and when a request found it unreachable."""

import asyncio
from collections.abc import Callable

from actors.engines.sglang.client.client import SglangClient
from actors.engines.sglang.server.server import Server
from actors.settings.engines import SglangEngineConfig
from bus.waiting import unless

DYING_S = 1.0
"""Between a broken connection and the end of the process it led to."""
FAILED_LOOKS = 2
"""So many health checks in a row take a server for dead."""


class HealthChecks:
    """Watches a server for as long as it lives."""

    def __init__(
        self, config: SglangEngineConfig, server: Server, connected: Callable[[], SglangClient], *,
        busy: Callable[[], bool], well: Callable[[], None],
    ) -> None:  # fmt: skip
        """`busy` says whether the server cannot generate now; `well` is called when it has generated."""
        self.looking = asyncio.Lock()
        """Held while its health is looked at, which generates a token."""
        self._config = config
        self._server = server
        self._connected = connected
        self._busy = busy
        self._well = well
        self._doubted = asyncio.Event()

    def doubt(self) -> None:
        """Have it looked at now."""
        self._doubted.set()

    async def until_it_fails(self) -> str:
        """Return why it serves no more, once that is so."""
        failed = 0
        while failed < FAILED_LOOKS:
            if reason := await self._ended_or_doubted():
                return reason
            async with self.looking:
                if self._busy():
                    continue
                healthy = await self._connected().healthy(self._config.health_timeout_s)
            if healthy:
                failed = 0
                self._well()
            elif not self._busy():
                failed += 1
        return f"it did not generate within {self._config.health_timeout_s:g} s, {FAILED_LOOKS} times"

    async def _ended_or_doubted(self) -> str:
        """Wait for the next look at the server: why it ended, or an empty string."""
        ended = await unless(self._doubted, self._server.ended(within_s=self._config.health_every_s))
        if ended is not None:
            return ended
        self._doubted.clear()
        return await self._server.ended(within_s=DYING_S)
