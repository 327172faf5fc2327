"""Sources of published weights for actors: the origin in the reference, or hosts that have parts of them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pkgutil import resolve_name
from typing import Protocol
from urllib.parse import urlsplit

from bus.connection import Bus
from bus.errors import BusError
from bus.messages import BlobRef
from storage.disk.atomic_files import Data
from storage.settings.weights_transport import TRANSPORTS, PeerConfig
from storage.weights.swarm import Swarm

SMALL_BYTES = 1 << 20
"""Size up to which a blob is fetched from its origin at once: to ask who has it would take longer."""


class BlobSource(Protocol):
    """A source of blobs."""

    async def get(self, ref: BlobRef) -> Data:
        """Return the bytes behind `ref`, verified. Raises `BusError` when they are not available."""


class Blobs:
    """Fetches blobs by the transport that their reference names; by HTTP from a swarm, if there is one."""

    def __init__(self, bus: Bus, swarm: Swarm | None = None) -> None:
        self._bus = bus
        self._swarm = swarm

    async def get(self, ref: BlobRef) -> Data:
        """Fetch the bytes behind `ref`. Raises `BusError` when they are gone or damaged."""
        scheme = urlsplit(ref.origin).scheme
        transport = TRANSPORTS.get(scheme)
        if transport is None:
            raise BusError(f"{ref.subject} lies at {ref.origin}: this build knows no transport {scheme!r}")
        if self._swarm is not None and transport.shared and ref.parts and ref.size_bytes > SMALL_BYTES:
            return await self._swarm.get(ref)
        found: Data = await resolve_name(transport.fetched_by)(self._bus, ref)
        return found


@asynccontextmanager
async def blob_source(bus: Bus, config: PeerConfig) -> AsyncIterator[BlobSource]:
    """Return the source of weights of an actor process, which passes parts on meanwhile."""
    swarm = Swarm(bus, config)
    try:
        yield Blobs(bus, swarm)
    finally:
        await swarm.close()
