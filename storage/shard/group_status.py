"""Tells actors what a shard has of a group, so that a lease that comes back costs only the rest."""

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial

from nats.aio.subscription import Subscription

from bus.codec import Message
from bus.connection import Bus
from bus.errors import BusError, StorageError
from bus.requests import Done, GroupStatus, GroupStatusRequest, KeptTurnsRequest
from bus.trajectory import KeptTurn, TrajectoryBatch
from storage.store.replay import ReplayStore

TURNS_AN_ANSWER = 64
"""Turns that a message of the answer has at most."""


async def serve_siblings(bus: Bus, store: ReplayStore, shard: int) -> Subscription:
    """Answer `GroupStatusRequest`s about this shard's groups."""
    return await bus.serve(
        bus.subject("rpc", "group_status", shard), GroupStatusRequest, partial(_answer, store)
    )


async def _answer(store: ReplayStore, request: GroupStatusRequest) -> list[Message]:
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
    """Answer `KeptTurnsRequest`s about this shard's leases."""
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
