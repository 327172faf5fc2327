"""Fetches the routed experts of stored trajectories from their shard, without the bus."""

import asyncio
import time

import aiohttp
import structlog

from bus.blobs import xxh3_of
from bus.connection import Bus
from bus.errors import BusError, DamagedError
from bus.trajectory import TrajectoryBatch
from bus.weight_requests import ExpertsPlace, ExpertsPlaceAsked
from storage.weights.blob_http import fetch_range, shown_access

log = structlog.get_logger()
ANSWER_TIMEOUT_S = 2.0
TIMEOUT = aiohttp.ClientTimeout(total=None, connect=3, sock_read=30)
"""A server behind a firewall is known soon: the bus has all that it has."""
AVOIDED_S = 600.0
"""Seconds for which all is read over the bus after a shard's server could not be reached."""


class ExpertReader:
    """Completes what shards answer to a `ReadRequest` whose routed experts are apart."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._avoided_until: dict[int, float] = {}

    def reads(self, shard: int) -> bool:
        """Return whether the shard's server is to be asked."""
        return time.monotonic() >= self._avoided_until.get(shard, 0.0)

    async def whole(self, shard: int, batches: list[TrajectoryBatch]) -> list[TrajectoryBatch]:
        """Return the answers with their routed experts. Raises `BusError` where the shard's server does not
        give them."""
        if all(batch.apart is None for batch in batches):
            return batches
        subject = self._bus.subject("rpc", "stored_experts", shard)
        place = await self._bus.request(
            subject, ExpertsPlaceAsked(), ExpertsPlace, timeout_s=ANSWER_TIMEOUT_S
        )
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            return [await _fetched(session, place, shard, batch) for batch in batches]

    def avoid(self, shard: int, error: BusError) -> None:
        """Leave the shard's server alone for a while: it did not give what the shard has."""
        self._avoided_until[shard] = time.monotonic() + AVOIDED_S
        log.warning("routed_experts_pass_the_bus", shard=shard, reason=str(error))


async def _fetched(
    session: aiohttp.ClientSession, place: ExpertsPlace, shard: int, batch: TrajectoryBatch
) -> TrajectoryBatch:
    if batch.apart is None:
        return batch
    data = bytearray(batch.apart_bytes)
    target = f"{place.url}{shard}-{batch.sampled[0].lease_id}-{len(data)}"
    await fetch_range(session, target, memoryview(data), 0, timeout=TIMEOUT, **shown_access(place.access))
    if await asyncio.to_thread(xxh3_of, [data]) != batch.apart.digest:
        raise DamagedError(f"{target}: these routed experts do not have their digest")
    return await asyncio.to_thread(batch.with_experts, data)
