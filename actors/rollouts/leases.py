"""What an actor asks and tells the storage of one policy about leases."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

import structlog
import xxhash

from actors.rollouts.account import ActorAccount
from actors.rollouts.group import NOTHING, Group, GroupMessage
from actors.weights.follow import PolicyFollower
from bus.codec import encode
from bus.connection import Bus
from bus.errors import HandBackError, SchemaError, SluiceError
from bus.messages import GroupRejected, Lease
from bus.process.log_throttle import LogThrottle
from bus.requests import GroupStatus, GroupStatusRequest, KeptTurnsRequest, LeaseRequest, LeaseState
from bus.streams.publish import Publisher, together
from bus.topology import shard_of
from bus.trajectory import KeptTurn, TrajectoryBatch
from storage.client.expert_sender import ExpertSender

log = structlog.get_logger()
ANSWER_TIMEOUT_S = 2.0
"""How long storage may take to answer; then the lease is rolled out as its message says."""
KEEP_TURNS_S = 10.0
"""Longest time that the bus has to take turns of rollouts that have not ended, or their finished siblings."""
STORED_S = 5.0
"""Longest wait for a shard to store them before a lease is handed back."""
LOOK_S = 0.1
UNANSWERED_LOG_PERIOD_S = 10.0
"""The shortest time between two log lines which say that storage does not answer: each lease finds it out."""
WEIGHTS_PATIENCE_S = 1.0
"""Weights that take longer may never come: the learner may have resumed from further back."""


class PolicyLeases:
    """Waits for weights that may sample a lease, and publishes its group or rejects it."""

    def __init__(
        self, bus: Bus, follower: PolicyFollower, *, shards: int, actor: str, counts: Counter[str],
        account: ActorAccount | None = None,
    ) -> None:  # fmt: skip
        """Work for `actor` on the run of `bus`; `counts` takes what it published and rejected, and `account`
        what is published."""
        self.counts = counts
        self.stop = asyncio.Event()
        """Set when this process is to end."""
        self.account = account or ActorAccount(None, actor)
        self._bus = bus
        self._follower = follower
        self._shards = shards
        self._actor = actor
        self._publisher = Publisher(bus)
        self._experts = ExpertSender(bus)
        self._unanswered = LogThrottle(UNANSWERED_LOG_PERIOD_S)

    async def may_sample(self, lease: Lease, *, asks: bool) -> int | None:
        """Wait for weights that may sample the lease: the oldest version that may, or None if it is settled.
        Weights that keep us waiting may be those of a learner that died: its successor needs the group before
        it gets there, and storage says so. Raises `HandBackError` when this process is to end."""
        version = lease.policy_version
        while True:
            self.hand_back_at_the_end(lease)
            if asks:
                state = await self.state(lease)
                if state.state == "settled":
                    return None
                version = state.policy_version
            try:
                async with asyncio.timeout(WEIGHTS_PATIENCE_S):
                    await self._follower.at_least(version)
            except TimeoutError:
                asks = True
            else:
                return version

    def hand_back_at_the_end(self, lease: Lease) -> None:
        """Raise `HandBackError` when this process is to end: what it waits for may take for ever."""
        if self.stop.is_set():
            raise HandBackError(f"lease {lease.lease_id} was not begun when this actor was stopped")

    async def state(self, lease: Lease, *, attempt: bool = False) -> LeaseState:
        """Return where the lease stands. Raises `SchemaError` when its prompt is quarantined."""
        found = await self.ask(LeaseRequest(lease_id=lease.lease_id, attempt=attempt), lease)
        if found.state == "quarantined":
            raise SchemaError(f"lease {lease.lease_id}: quarantined, since its rollouts ended their actors")
        return found

    async def ask(self, request: LeaseRequest, lease: Lease) -> LeaseState:
        """Ask storage about the lease; without an answer it is open, as its message says."""
        subject = self._bus.subject("rpc", "lease")
        try:
            return await self._bus.request(subject, request, LeaseState, timeout_s=ANSWER_TIMEOUT_S)
        except SluiceError as error:
            if times := self._unanswered.due(time.monotonic()):
                log.warning("lease_state_not_known", times=times, lease_id=lease.lease_id, reason=str(error))
            return LeaseState(state="open", policy_version=lease.policy_version)

    async def stored(self, lease: Lease) -> GroupStatus:
        """Return what the shard has of the group. Without an answer all is rolled out: ids make that
        harmless."""
        subject = self._bus.subject("rpc", "group_status", shard_of(lease.lease_id, self._shards))
        request = GroupStatusRequest(lease_id=lease.lease_id)
        try:
            return await self._bus.request(subject, request, GroupStatus, timeout_s=ANSWER_TIMEOUT_S)
        except SluiceError as error:
            log.warning("siblings_not_known", lease_id=lease.lease_id, reason=str(error))
            return NOTHING

    async def kept_turns(self, lease: Lease) -> list[KeptTurn]:
        """Return the turns that other actors left of rollouts which they did not end. Without an answer they
        are sampled again."""
        subject = self._bus.subject("rpc", "kept_turns", shard_of(lease.lease_id, self._shards))
        request = KeptTurnsRequest(lease_id=lease.lease_id)
        try:
            batches = await self._bus.request_many(
                subject, request, TrajectoryBatch, timeout_s=ANSWER_TIMEOUT_S
            )
        except SluiceError as error:
            log.warning("turns_not_known", lease_id=lease.lease_id, reason=str(error))
            return []
        return [turn for batch in batches for turn in batch.turns]

    async def keep_turns(self, lease: Lease, turns: Sequence[KeptTurn]) -> bool:
        """Send turns of rollouts that have not ended; return whether the bus has them."""
        shard = shard_of(lease.lease_id, self._shards)
        subject = self._bus.subject("trajectories", shard)
        batch = TrajectoryBatch(trajectories=(), turns=tuple(turns))
        data = encode(await self._experts.lightened(shard, batch))
        name = f"turns-{xxhash.xxh3_128_hexdigest(data)}"  # no name of a group, whose lease would be refunded
        try:
            await self._publisher.publish(subject, data, message_id=name, timeout_s=KEEP_TURNS_S)
        except SluiceError as error:
            log.warning("turns_not_kept", lease_id=lease.lease_id, turns=len(turns), reason=str(error))
            return False
        self.counts["kept_turns"] += len(turns)
        return True

    async def turns_stored(self, lease: Lease, turns: int) -> None:
        """Wait a moment until the shard has so many turns, so that who gets the lease next finds them."""
        deadline = time.monotonic() + STORED_S
        while (found := await self.stored(lease)) is not NOTHING and found.turns < turns:
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(LOOK_S)

    async def publish(self, group: Group) -> None:
        shard = shard_of(group.lease.lease_id, self._shards)
        messages = group.unsent()
        await together(self._publish(shard, message) for message in messages)
        self.counts["trajectories"] += sum(len(message.batch.trajectories) for message in messages)

    async def _publish(self, shard: int, message: GroupMessage) -> None:
        name, batch, data = message
        sent = await self.account.sent(batch.trajectories)
        data = data or encode(await self._experts.lightened(shard, batch))
        ack = await self._publisher.publish(self._bus.subject("trajectories", shard), data, message_id=name)
        await self.account.acknowledged(sent, ack, run=batch.trajectories[0].run)

    async def publish_soon(self, group: Group) -> bool:
        """Send what is finished of a group that is handed back; return whether the bus took it in time."""
        try:
            async with asyncio.timeout(KEEP_TURNS_S):
                await self.publish(group)
        except TimeoutError:
            reason = f"the bus did not take them within {KEEP_TURNS_S:g} s"
        except SluiceError as error:
            reason = str(error)
        else:
            return True
        log.warning("siblings_not_handed_on", lease_id=group.lease.lease_id, reason=reason)
        return False

    async def reject(self, lease_id: int, reason: str, detail: str, rewards: tuple[float, ...] = ()) -> None:
        """Tell storage that the lease gives no group, which refunds it."""
        event = GroupRejected(
            lease_id=lease_id, reason=reason, detail=detail, actor=self._actor, rewards=rewards
        )
        subject = self._bus.subject("outcomes", "rejected")
        await self._publisher.publish(subject, encode(event), message_id=f"rejected-{lease_id}")
        self.counts["rejected"] += 1

    async def on_unreadable(self, subject: str, _: str, error: SchemaError) -> None:
        """Refund a lease that nobody can read, or else it would be published again for ever."""
        number = subject.rpartition(".")[2]
        if number.isdecimal():  # older builds named no lease in the subject
            await self.reject(int(number), "set_aside", str(error))
