"""Puts leases on TASKS: at their issue, after a crash those that are not there yet, and lost ones anew."""

import asyncio
import secrets
from collections.abc import Iterable, Sequence

import structlog

from bus.codec import encode
from bus.connection import Bus
from bus.messages import Lease
from bus.streams.publish import Publisher
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
        """Publish the leases that still roll out, and remember durably that they are published.

        They have been flushed to the ledger: a crash must not issue again what an actor has."""
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
