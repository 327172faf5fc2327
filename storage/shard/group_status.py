"""Tells actors which siblings of a group a shard has, so that a lease that comes back costs only the rest."""

import asyncio
from functools import partial

from nats.aio.subscription import Subscription

from bus.codec import Message
from bus.connection import Bus
from bus.errors import BusError, StorageError
from bus.requests import GroupStatus, GroupStatusRequest
from storage.store.replay import ReplayStore


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
        )
    ]
