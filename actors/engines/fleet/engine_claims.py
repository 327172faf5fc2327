"""Claims on servers that somebody else keeps alive: one actor of a run uses each, for one of its policies."""

import asyncio
import platform
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Self
from urllib.parse import urlsplit

import xxhash

from actors.settings.engines import EngineConfig
from bus.connection import Bus
from bus.connection.roles import hold_role
from bus.errors import ConfigError
from bus.messages import RoleHolder
from bus.server.nats_server import is_loopback
from bus.waiting import set_within

LOOK_S = 1.0
"""Seconds between two checks whether another actor took a claim over."""


class EngineClaims:
    """Servers that this actor alone uses: two would load weights over each other's. A claim expires when its
    actor is gone, however that ended. It is a role of the run, also for a server of a further policy: no
    actor of another policy takes that server."""

    def __init__(self, bus: Bus, actor: str) -> None:
        """Claim for `actor` on `bus`, which is that of the run itself and not of a further policy's run."""
        self._bus = bus
        self._actor = actor
        self._held: dict[str, tuple[AsyncExitStack, asyncio.Task[None]]] = {}

    @classmethod
    @asynccontextmanager
    async def open(cls, bus: Bus, actor: str, engine: EngineConfig) -> AsyncIterator[Self]:
        """Claim the servers that the settings attach to, until the context is left. Raises `ConfigError` for
        one that another actor uses."""
        claims = cls(bus, actor)
        try:
            await claims.claim_attached(engine)
            yield claims
        finally:
            for url in list(claims._held):
                await claims.release(url)

    async def claim_attached(self, engine: EngineConfig) -> None:
        """Claim the servers that the settings attach to. Raises `ConfigError` as `claim` does."""
        for url in engine.claimed:
            await self.claim(url)

    async def claim(self, url: str) -> None:
        """Claim one more server. Raises `ConfigError` naming the actor that uses it."""
        role, stack = role_of(url), AsyncExitStack()
        try:
            renewing = await stack.enter_async_context(hold_role(self._bus, role, self._actor))
        except ConfigError as error:
            found = await self._bus.get(f"role.{role}", RoleHolder)
            other = found[0].incarnation if found is not None else "another actor"
            raise ConfigError(
                f"{url}: {other} uses this server, and two actors would load weights over each other's: "
                "name another server, or stop that actor first"
            ) from error
        self._held[url] = stack, renewing

    async def release(self, url: str) -> None:
        """Leave a server to other actors; nothing happens for one that is not claimed."""
        if url in self._held:
            await self._held.pop(url)[0].aclose()

    async def run(self, stop: asyncio.Event) -> None:
        """Watch the claims until `stop`. Raises `FencedError` when another actor took one over."""
        while not stop.is_set():
            for _, renewing in list(self._held.values()):
                if renewing.done():
                    renewing.result()
            await set_within(stop, LOOK_S)


def role_of(url: str) -> str:
    """Return the role of who uses the server at `url`. One on loopback is another on each host."""
    where = platform.node() if is_loopback(urlsplit(url).hostname or "") else ""
    server = f"{where} {url.rstrip('/').lower()}"
    return f"engine.{xxhash.xxh3_64(server.encode()).hexdigest()}"
