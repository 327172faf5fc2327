"""A shard's answers about its groups: what an actor need not roll out again, and which are closed short."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import structlog
from nats.aio.subscription import Subscription

from bus.codec import Message
from bus.connection import Bus
from bus.errors import BusError, StorageError
from bus.requests import Closed, CloseRequest, Done, GroupStatus, GroupStatusRequest, KeptTurnsRequest
from bus.topology import by_shard
from bus.trajectory import KeptTurn, TrajectoryBatch
from storage.store.replay import ReplayStore

log = structlog.get_logger()
TURNS_AN_ANSWER = 64
"""Turns that a message of the answer has at most."""
FEWEST = 2
"""Siblings that make a group: one alone has nothing to be compared with."""
ANSWER_TIMEOUT_S = 5.0


async def serve_siblings(bus: Bus, store: ReplayStore, shard: int) -> Subscription:
    return await bus.serve(
        bus.subject("rpc", "group_status", shard), GroupStatusRequest, partial(_status, store)
    )


async def _status(store: ReplayStore, request: GroupStatusRequest) -> list[Message]:
    try:
        found = await asyncio.to_thread(store.trajectories_of, request.lease_id)
    except StorageError as error:
        raise BusError(str(error)) from error
    return [
        GroupStatus(
            group_size=found[0].group_size if found else 0,
            samples=tuple(t.sample for t in found),
            rewards=tuple(t.agent_reward for t in found if t.is_trained),
            rewards_due=any(t.reward_due for t in found),
            turns=store.turns.number_of(request.lease_id),
        )
    ]


async def serve_turns(bus: Bus, store: ReplayStore, shard: int) -> Subscription:
    return await bus.serve(bus.subject("rpc", "kept_turns", shard), KeptTurnsRequest, partial(_turns, store))


async def _turns(store: ReplayStore, request: KeptTurnsRequest) -> list[Message]:
    try:
        found = await asyncio.to_thread(store.turns.of, request.lease_id)
    except StorageError as error:
        raise BusError(str(error)) from error
    return [*_packed(found), Done()]


def _packed(turns: Sequence[KeptTurn]) -> Iterator[TrajectoryBatch]:
    for begin in range(0, len(turns), TURNS_AN_ANSWER):
        yield TrajectoryBatch(trajectories=(), turns=tuple(turns[begin : begin + TURNS_AN_ANSWER]))


async def close_short(bus: Bus, lease_ids: Iterable[int], shards: int) -> tuple[list[int], list[int]]:
    """Have shards close these groups; return those that are complete now and those with too few siblings. A
    shard that does not answer is left out of both: it is asked again."""
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
    return await bus.serve(bus.subject("rpc", "close", shard), CloseRequest, partial(_closed, store))


async def _closed(store: ReplayStore, request: CloseRequest) -> list[Message]:
    try:
        complete = await asyncio.to_thread(store.close_short, request.lease_ids, fewest=FEWEST)
    except StorageError as error:
        raise BusError(str(error)) from error
    return [Closed(lease_ids=tuple(complete))]
