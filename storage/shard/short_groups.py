"""Closes groups short: the dispatcher asks each shard to give out what it has of those that keep a step."""

import asyncio
from collections.abc import Iterable
from functools import partial

import structlog
from nats.aio.subscription import Subscription

from bus.codec import Message
from bus.connection import Bus
from bus.errors import BusError, StorageError
from bus.requests import Closed, CloseRequest
from bus.topology import by_shard
from storage.store.replay import ReplayStore

log = structlog.get_logger()
FEWEST = 2
"""Siblings that make a group: one alone has nothing to be compared with."""
ANSWER_TIMEOUT_S = 5.0


async def close_short(bus: Bus, lease_ids: Iterable[int], shards: int) -> tuple[list[int], list[int]]:
    """Have shards close these groups; return those that are complete now and those with too few siblings.

    A shard that does not answer is left out of both: it is asked again.
    """
    complete: list[int] = []
    few: list[int] = []
    for shard, asked in by_shard(lease_ids, shards).items():
        request = CloseRequest(lease_ids=tuple(asked))
        try:
            answer = await bus.request(
                bus.subject("rpc", "close", shard), request, Closed, timeout_s=ANSWER_TIMEOUT_S
            )
        except BusError as error:
            log.warning("groups_not_closed", shard=shard, reason=str(error))
            continue
        complete += answer.lease_ids
        few += [lease_id for lease_id in asked if lease_id not in answer.lease_ids]
    return complete, few


async def serve_closing(bus: Bus, store: ReplayStore, shard: int) -> Subscription:
    """Answer `CloseRequest`s about this shard's groups."""
    return await bus.serve(bus.subject("rpc", "close", shard), CloseRequest, partial(_answer, store))


async def _answer(store: ReplayStore, request: CloseRequest) -> list[Message]:
    try:
        complete = await asyncio.to_thread(store.close_short, request.lease_ids, fewest=FEWEST)
    except StorageError as error:
        raise BusError(str(error)) from error
    return [Closed(lease_ids=tuple(complete))]
