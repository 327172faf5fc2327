"""Leases: how they reach actors, and how those of a storage that ended are found again."""

import asyncio
import secrets
from collections.abc import Collection, Iterable, Sequence

import nats.errors
import structlog

from bus.codec import encode
from bus.connection import Bus
from bus.errors import BusError
from bus.messages import Lease
from bus.requests import FullGroups, FullGroupsRequest
from bus.streams.publish import Publisher
from bus.topology import by_shard, trajectories_streams
from storage.ledger.sampling import Candidate
from storage.prompts.data_sets import DataSets
from storage.shard.ingest_checks import LedgerFacts

log = structlog.get_logger()
PUBLISHED_THROUGH = "published_through"
"""Fact of the ledger: the lease up to which all were published."""


class LeasePublication:
    """Publishes leases that the ledger has on the disk, and keeps there how far that went."""

    def __init__(self, bus: Bus, facts: LedgerFacts, data: DataSets, *, samples: int) -> None:
        self._bus = bus
        self._facts = facts
        self._ledger = facts.ledger
        self._data = data
        self._samples = samples
        self._publisher = Publisher(bus, part_bytes=None)  # parts would scatter over the actors

    @property
    def through(self) -> int:
        """Return the lease up to which all were published, -1 before the first."""
        return int(self._ledger.facts.get(PUBLISHED_THROUGH, "-1"))

    async def publish(self, lease_ids: Sequence[int], *, again: bool = False) -> None:
        """Publish the leases that still roll out, and remember durably that they are published. They have
        been flushed to the ledger: a crash must not issue again what an actor has."""
        if not lease_ids:
            return
        rolling_out = self._ledger.rolling_out
        await self._send([rolling_out[n] for n in lease_ids if n in rolling_out], again=again)
        self._ledger.set_fact(PUBLISHED_THROUGH, str(max(self.through, *lease_ids)))
        await asyncio.to_thread(self._ledger.flush)  # the bus recognises what it has for two minutes only

    async def publish_unpublished(self, *, everything: bool) -> None:
        """Publish what a crash left issued but unpublished, or all that is out if the bus lost it."""
        through = -1 if everything else self.through
        again = [lease_id for lease_id in self._ledger.rolling_out if lease_id > through]
        if again:
            log.info("leases_published_again", count=len(again))
        await self.publish(again, again=True)

    async def publish_lost(self, lost: Sequence[Candidate]) -> None:
        """Publish anew what a crash of the bus, or a message that nobody understood, has swallowed."""
        log.warning("leases_lost", count=len(lost), first=lost[0].lease_id)
        attempt = secrets.token_hex(4)  # the bus may remember that it once had them
        await self._send(lost, f"-{attempt}", again=True)

    async def _send(self, leases: Iterable[Candidate], attempt: str = "", *, again: bool) -> None:
        async with asyncio.TaskGroup() as tasks:
            for lease in leases:
                tasks.create_task(self._send_one(lease, attempt, again=again))

    async def _send_one(self, issued: Candidate, attempt: str, *, again: bool) -> None:
        lease = Lease(
            lease_id=issued.lease_id,
            prompt=self._data.prompt(issued.lease_id),
            samples=self._samples,
            policy_version=issued.policy_version,
            republished=again,
            run=self._facts.run,
        )
        subject = self._bus.subject("tasks", "rollout", issued.lease_id)
        message_id = f"lease-{issued.lease_id}{attempt}"
        await self._publisher.publish(subject, encode(lease), message_id=message_id)


ANSWER_TIMEOUT_S = 1.0
SUBJECTS_TOLD = 100_000
"""A server tells no more subjects at a time (JSMaxSubjectDetails)."""


class LostLeases:
    """Looks for leases that are gone, while others are under way.

    A lease becomes trajectories or a rejection, and these an entry in a shard or in the ledger, each gone
    only after the next is there. So what is not on TASKS is among what TRAJECTORIES and OUTCOMES hold then;
    once they were read so far, it is stored, settled or lost."""

    def __init__(self, bus: Bus, shards: int) -> None:
        self._bus = bus
        self._shards = shards
        self._suspects: set[int] = set()
        """Not on TASKS when that was looked at last."""
        self._trajectories: dict[str, int] = {}
        self._events = 0
        """Numbers on their streams of the last messages that may be of a suspect."""

    async def look(self, published: Collection[int]) -> list[int]:
        """Return the leases of `published` that are no longer on the bus: stored since then, or lost. None as
        long as that cannot be told: ask again."""
        try:
            self._suspects &= set(published)
            if not self._suspects:
                await self._suspect(published)
            if not self._suspects or not await self._all_read():
                return []
        except (nats.errors.Error, ValueError) as error:  # ValueError: a subject that is garbled
            log.warning("bus_not_searched_for_leases", reason=str(error))
            return []
        found, self._suspects = sorted(self._suspects), set()
        return found

    async def not_whole(self, lease_ids: Sequence[int]) -> list[int]:
        """Return the leases that are not stored in full; one that only waits for late rewards is not lost."""
        whole: set[int] = set()
        try:
            for shard, asked in by_shard(lease_ids, self._shards).items():
                subject, request = (
                    self._bus.subject("rpc", "full_groups", shard),
                    FullGroupsRequest(lease_ids=tuple(asked)),
                )
                answer = await self._bus.request(subject, request, FullGroups, timeout_s=ANSWER_TIMEOUT_S)
                whole.update(answer.lease_ids)
        except BusError as error:
            log.debug("shard_does_not_answer", reason=str(error))
            return []
        return [lease_id for lease_id in lease_ids if lease_id not in whole]

    async def _suspect(self, published: Collection[int]) -> None:
        js, topology = self._bus.js, self._bus.topology
        subject = self._bus.subject("tasks", "rollout", "*")
        subjects = (await js.stream_info(topology.stream("TASKS"), subject)).state.subjects or {}
        missing = set(published) - {int(name.rpartition(".")[2]) for name in subjects}
        if not missing or len(subjects) >= SUBJECTS_TOLD:
            return
        streams = map(topology.stream, trajectories_streams(self._shards))
        trajectories = {name: (await js.stream_info(name)).state.last_seq for name in streams}
        events = (await js.stream_info(topology.stream("OUTCOMES"))).state.last_seq
        self._suspects, self._trajectories, self._events = missing, trajectories, events

    async def _all_read(self) -> bool:
        """Return whether no message that may be of a suspect waits to be read. A stream that is new has
        none."""
        js, topology = self._bus.js, self._bus.topology
        for name, last in self._trajectories.items():
            there = (await js.stream_info(name)).state
            if there.messages and there.first_seq <= last <= there.last_seq:
                return False
        events = await js.consumer_info(topology.stream("OUTCOMES"), "dispatcher")
        if not events.num_pending and not events.num_ack_pending:
            return True
        return events.ack_floor is not None and events.ack_floor.stream_seq >= self._events
