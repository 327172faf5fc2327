"""Servers of the run's own policy that serve further policies too: which engine has each of them now."""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from actors.engines.base import Engine
from actors.engines.served_adapters import ServedAdapters
from bus.errors import EngineError
from bus.waiting import set_within

if TYPE_CHECKING:
    from actors.engines.fleet.fleet import Fleet
    from actors.engines.fleet.member import Build
    from actors.engines.sglang.engine import SglangEngine

LOOK_S = 0.5
"""Seconds between two looks whether a server is up."""
FIRST_WAIT_S = 5.0
"""Longest wait for a server at which nothing was built yet: its engine had started, or failed, before."""


class SharedServers:
    """Knows the engine at each server, and builds those of further policies at it. One that fails takes them
    with it; they are built again at the engine that comes after it."""

    def __init__(self, own: ServedAdapters | None, further: Mapping[str, ServedAdapters]) -> None:
        """Serve `own`, the adapters of the run's own policy, and those of the policies in `further`. Without
        `own` the engines take whole weights, each of one policy."""
        self.own = own
        """Adapters of the run's own policy."""
        self.further = further
        """Adapters of the further policies at its servers, by name."""
        self._places: list[str] = []
        self._engines: dict[str, SglangEngine] = {}
        """The engine that was built last in each place of the run's own fleet."""
        self._built = asyncio.Event()
        self._fleets: dict[str, Fleet] = {}

    def hosts(self, builds: "Mapping[str, Build]") -> "Mapping[str, Build]":
        """Return what builds the engines of the run's own policy, which are known here from then on."""
        if not self.further:
            return builds
        self._places += builds
        return {place: partial(self._host, place, build) for place, build in builds.items()}

    def guests(self, name: str) -> "dict[str, Build]":
        return {place: self._guest(name, place) for place in self._places}

    def admit(self, name: str, fleet: "Fleet") -> None:
        """Have a further policy's fleet follow servers that join and leave."""
        self._fleets[name] = fleet

    def joined(self, place: str) -> None:
        """Have all further policies served by a server that joins. Raises `EngineError` as `Fleet.join`."""
        for name, fleet in self._fleets.items():
            fleet.join(place, self._guest(name, place))

    async def leave(self, place: str) -> None:
        """Take all further policies from a server that is about to leave; their requests go on elsewhere."""
        await asyncio.gather(*(fleet.leave(place) for fleet in self._fleets.values()))
        self._engines.pop(place, None)

    async def up(self, place: str, *, within_s: float | None = None) -> "SglangEngine":
        """Return the engine in a place as soon as its server is up; the caller bounds the wait. Raises
        `EngineError` where that takes longer than `within_s`."""
        try:
            async with asyncio.timeout(within_s):
                while (
                    (engine := self._engines.get(place)) is None or engine.failure or not engine.up.is_set()
                ):
                    self._built.clear()
                    await set_within(self._built if engine is None or engine.failure else engine.up, LOOK_S)
        except TimeoutError as error:
            raise EngineError(f"{place} of the run's own policy, which serves this too, is not up") from error
        return engine

    async def _host(self, place: str, build: "Build") -> Engine:
        from actors.engines.sglang.engine import SglangEngine

        engine = await build()
        if not isinstance(engine, SglangEngine):
            raise TypeError(f"{type(engine).__name__} in {place} serves one policy only")
        self._engines[place] = engine
        self._built.set()
        return engine

    def _guest(self, name: str, place: str) -> "Build":
        return _Guest(self, place, name, self.further[name]).build


class _Guest:
    def __init__(self, servers: SharedServers, place: str, name: str, served: ServedAdapters) -> None:
        self._servers = servers
        self._place = place
        self._name = name
        self._served = served
        self._tried = False

    async def build(self) -> Engine:
        """Wait for the server, but the first time not long: all others would be waited for."""
        from actors.engines.sglang.guest import GuestEngine

        within_s = None if self._tried else FIRST_WAIT_S
        self._tried = True
        host = await self._servers.up(self._place, within_s=within_s)
        return GuestEngine(host, self._name, self._served)
