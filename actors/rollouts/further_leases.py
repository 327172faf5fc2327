"""Takes leases of a further policy, one for each group that is about to begin."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from actors.rollouts.group import Group
from actors.rollouts.held_lease import HeldLease
from actors.rollouts.leases import PolicyLeases
from actors.rollouts.participation import Participation
from actors.weights.follow import PolicyFollower
from bus.connection import Bus
from bus.errors import HandBackError
from bus.messages import Lease
from bus.streams.consume import Inbox, consume_received
from bus.streams.message_parts import Parts
from bus.streams.received import Received
from bus.waiting import set_within

LOOK_S = 0.5
"""Longest time in which a group that waits for a lease notices that it gets none."""


class FurtherLeases:
    """Has a lease of this policy for each group that a worker rolls out.

    A lease says how far its policy's learner has got, and bounds the staleness of that policy's tokens; its
    prompt is not looked at. A group waits until each of its policies has a lease, so all of them are as stale
    as their own learners allow, and the slowest one sets the pace."""

    def __init__(self, name: str, bus: Bus, leases: PolicyLeases, follower: PolicyFollower) -> None:
        self._name = name
        self._bus = bus
        self._leases = leases
        self._follower = follower
        self._waiting: deque[asyncio.Future[HeldLease]] = deque()
        """Groups that wait, the longest waiting first."""
        self._wanted = asyncio.Event()
        self._preparing = 0
        """Leases that were taken and wait for weights."""
        self._participation = Participation(
            name, f"name the agents that it is in policies.{name}.agents, as the environment names them"
        )

    @property
    def counts(self) -> Counter[str]:
        """Return how many groups, trajectories and rejections the policy has had here."""
        return self._leases.counts

    async def run(self, stop: asyncio.Event, *, groups_at_once: int) -> None:
        """Take leases as groups want them until `stop`, and wait for the end of the groups that have one."""
        self._leases.stop = stop
        parts = Parts(self._bus, on_unreadable=self._leases.on_unreadable)
        await consume_received(
            Inbox(self._bus, "TASKS", "rollout", parts),
            self._bus,
            Lease,
            self._on_lease,
            stop=stop,
            concurrency=groups_at_once,
            room=self._room,
        )

    @asynccontextmanager
    async def held(self) -> AsyncIterator[HeldLease | None]:
        """Have a lease while inside; None once the policy's learner is done, which only plays from then on.
        Raises `HandBackError` when this process is to end."""
        found = await self._next()
        try:
            yield found
        finally:
            if found is not None:
                found.ended.set()

    def takes_part(self, part: Group) -> bool:
        """Return whether the policy has trajectories in its part of a group. Raises `ConfigError` as
        `Participation` does."""
        self._participation.note(took_part=bool(part.episodes), has_played=bool(part.unfailed))
        return bool(part.episodes)

    async def _next(self) -> HeldLease | None:
        waiter: asyncio.Future[HeldLease] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._wanted.set()
        try:
            while not waiter.done():
                if self._follower.stage == "done":
                    return None
                self._hand_back_at_the_end()
                await asyncio.wait([waiter], timeout=LOOK_S)
            return waiter.result()
        except BaseException:  # the waiter is gone, perhaps as it was given a lease
            if waiter.done():
                waiter.result().ended.set()
            raise
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    def _hand_back_at_the_end(self) -> None:
        if self._leases.stop.is_set():
            raise HandBackError(f"no lease of policy {self._name!r} came before this actor's end")

    async def _room(self, most: int) -> int:
        if not self._missing:
            self._wanted.clear()
            await set_within(self._wanted, LOOK_S)
        return min(most, self._missing)

    @property
    def _missing(self) -> int:
        """Return the number of groups that wait for a lease which is not here yet."""
        return max(0, len(self._waiting) - self._preparing)

    async def _on_lease(self, received: Received[Lease]) -> None:
        """The lease is acked when this returns; by `HandBackError` it is another group's."""
        lease = received.message
        self._preparing += 1
        try:
            asks = lease.republished or received.deliveries > 1
            version = await self._leases.may_sample(lease, asks=asks)
        finally:
            self._preparing -= 1
        if version is None:
            self._leases.counts["settled"] += 1
            return
        if not self._waiting:
            raise HandBackError(f"lease {lease.lease_id} of policy {self._name!r}: no group waits any more")
        held = HeldLease(lease, version, self._leases)
        self._waiting.popleft().set_result(held)
        await held.ended.wait()
        if not held.is_settled:
            raise HandBackError(f"lease {lease.lease_id} of policy {self._name!r} was not used")


async def held_leases(further: Mapping[str, FurtherLeases], stack: AsyncExitStack) -> dict[str, HeldLease]:
    """Have a lease of each policy whose learner is not done, by name, until `stack` is closed."""
    found = {name: await stack.enter_async_context(leases.held()) for name, leases in further.items()}
    return {name: held for name, held in found.items() if held is not None}
