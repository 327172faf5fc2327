"""Sends routed experts from an actor to the shard of their trajectories, without the bus."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence

import aiohttp
import structlog

from bus.blobs import sha256_of
from bus.connection import Bus
from bus.errors import BusError
from bus.process.log_throttle import LogThrottle
from bus.trajectory import LEAST_APART_BYTES, TrajectoryBatch
from bus.weight_requests import ExpertsPlace, ExpertsPlaceAsked
from storage.weights.blob_http import shown_access

log = structlog.get_logger()
AT_ONCE = 4
"""Messages whose routed experts are sent at a time."""
ANSWER_TIMEOUT_S = 2.0
AVOIDED_S = 60.0
"""Seconds for which a shard's server is left alone after it could not be reached."""
STALLED_S = 10.0
"""Seconds without progress after which a shard's server is taken for one that hangs."""
LOG_PERIOD_S = 60.0
SLOWEST_BYTES_PER_S = 2 << 20
PIECE_BYTES = 1 << 20
OWN_BYTES = 16
"""Random bytes behind the routed experts of a message, whose file is then no other's with equal ones."""


class ExpertSender:
    """Sends the routed experts of trajectories to shards by HTTP."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._places: dict[int, ExpertsPlace] = {}
        self._avoided_until: dict[int, float] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._failures = LogThrottle(LOG_PERIOD_S)

    async def lightened(self, shard: int, batch: TrajectoryBatch) -> TrajectoryBatch:
        """Send the routed experts of a message to the shard, and return it without them.

        It is returned as it is where they are few, or the shard cannot be reached: then it all travels over
        the bus."""
        experts = [one.routed_experts for one in batch.sampled]
        if sum(map(len, experts)) < LEAST_APART_BYTES:
            return batch
        experts.append(secrets.token_bytes(OWN_BYTES))
        async with self._slots:
            if time.monotonic() < self._avoided_until.get(shard, 0.0):
                return batch
            sha256 = await asyncio.to_thread(sha256_of, experts)
            try:
                await self._send(shard, sha256, experts)
            except BusError as error:
                self._avoided_until[shard] = time.monotonic() + AVOIDED_S
                if times := self._failures.due(time.monotonic()):
                    log.warning("routed_experts_pass_the_bus", shard=shard, times=times, reason=str(error))
                return batch
        return batch.without_experts(sha256)

    async def _send(self, shard: int, sha256: bytes, experts: Sequence[bytes]) -> None:
        """Raises `BusError` where the shard does not take them."""
        known = self._places.pop(shard, None)
        if known is not None:
            try:
                await _put(known, shard, sha256, experts)
            except BusError as error:  # the shard may have begun again, at another port
                log.debug("server_of_shard_gone", shard=shard, url=known.url, reason=str(error))
            else:
                self._places[shard] = known
                return
        asked = self._bus.subject("rpc", "experts", shard)
        place = await self._bus.request(asked, ExpertsPlaceAsked(), ExpertsPlace, timeout_s=ANSWER_TIMEOUT_S)
        if self._bus.secured and place.access is None:
            raise BusError(f"{place.url} asks for no token on a secured bus")
        await _put(place, shard, sha256, experts)
        self._places[shard] = place


async def _put(place: ExpertsPlace, shard: int, sha256: bytes, experts: Sequence[bytes]) -> None:
    """Put bytes to a server. Raises `BusError` unless it has them then."""
    size_bytes = sum(map(len, experts))
    target = f"{place.url}{shard}-{sha256.hex()}"
    shown = shown_access(place.access)
    headers = {**shown.pop("headers", {}), "Content-Length": str(size_bytes)}
    timeout = aiohttp.ClientTimeout(total=30 + size_bytes / SLOWEST_BYTES_PER_S, connect=3)
    try:
        async with (
            asyncio.timeout(STALLED_S) as stalled,
            aiohttp.ClientSession(timeout=timeout) as session,
            session.put(
                target, data=_pieces(experts, stalled), headers=headers, allow_redirects=False, **shown
            ) as answer,
        ):
            if answer.status != 201:
                raise BusError(f"{target}: {answer.status} {(await answer.text())[:200]}")
    except TimeoutError as error:
        raise BusError(f"{target}: the server took nothing for {STALLED_S:g} s, or too little") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise BusError(f"{target}: {error!r}") from error


async def _pieces(experts: Sequence[bytes], stalled: asyncio.Timeout) -> AsyncIterator[memoryview]:
    """Yield the bytes to send, and put `stalled` off whenever the server has taken some."""
    for one in experts:
        for begin in range(0, len(one), PIECE_BYTES):
            stalled.reschedule(asyncio.get_running_loop().time() + STALLED_S)
            yield memoryview(one)[begin : begin + PIECE_BYTES]
