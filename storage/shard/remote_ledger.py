"""What a shard away from the dispatcher knows of its ledger: a trajectory's own word counts for nothing."""

import asyncio
import time

import structlog

from bus.connection import Bus
from bus.errors import BusError, ConfigError
from bus.requests import Issued, IssuedRequest
from bus.waiting import RETRY_S, is_away
from storage.store.replay import ReplayStore
from storage.store.settled import refuse_older_ledger

log = structlog.get_logger()
ANSWER_TIMEOUT_S = 10.0
REFUSAL_LIMIT_S = 120.0
"""Seconds for which the dispatcher may refuse to answer: it may be starting."""


class IssuedLeases:
    """How many leases the run has issued, and its `RunFacts`, as one shard heard them last."""

    def __init__(self, bus: Bus, shard: int, stop: asyncio.Event) -> None:
        self._bus = bus
        self._shard = shard
        self._stop = stop
        self._known = Issued(next_id=0, seen=0)
        self._versions: dict[int, int] = {}
        """Policy version of each lease that was rolling out for this shard."""

    @property
    def run(self) -> str:
        return self._known.run

    @property
    def vocabulary(self) -> int | None:
        return self._known.vocabulary

    @property
    def newest_version(self) -> int | None:
        return self._known.newest_version

    def issue_version(self, lease_id: int) -> int | None:
        """Return the version of a lease that was rolling out at the last answer; `hear_of` asks again."""
        return self._versions.get(lease_id)

    async def look(self) -> None:
        """Ask the dispatcher, which looks for a new version first. Raises `BusError` as `hear_of` does."""
        await self._ask()

    def was_issued(self, lease_id: int) -> bool:
        """Return whether this run ever gave that lease out, as far as was heard: ask `hear_of` first."""
        return 0 <= lease_id < self._known.next_id

    async def hear_of(self, lease_id: int) -> None:
        """Ask the dispatcher, unless the lease is known. Raises `BusError` when it does not answer."""
        if lease_id >= self._known.next_id:
            await self._ask()

    async def refuse_other_run(self, store: ReplayStore) -> None:
        """Raise `ConfigError` when the ledger knows more of this shard than is here, or less, and
        `LostDataError` when it is older than what was settled here.

        Groups of a lease that is yet to be issued would stand in the way of its own."""
        known, youngest, stored, noted = await self._ask(), store.youngest, store.completions, store.settled
        refuse_older_ledger(
            "the dispatcher's ledger",
            str(store.directory),
            noted,
            issued=known.next_id,
            seen=known.seen,
            again=filter(noted.covers, known.rolling_out),
        )
        if youngest >= known.next_id:
            raise ConfigError(
                f"{store.directory} holds the group of lease {youngest}, but the ledger has issued only "
                f"{known.next_id}: restore the ledger, or move the directory away if it is another run's"
            )
        if stored < known.seen:
            raise ConfigError(
                f"{store.directory} holds {stored} complete groups, but the ledger has seen {known.seen} in "
                f"shard {self._shard}: give the --directory where it is, or restore it"
            )

    async def _ask(self) -> Issued:
        subject, request = self._bus.subject("rpc", "issued"), IssuedRequest(shard=self._shard)
        began, waiting = time.monotonic(), False
        while True:
            try:
                known = await self._bus.request(subject, request, Issued, timeout_s=ANSWER_TIMEOUT_S)
            except BusError as error:
                limit_s = self._bus.patience_s if is_away(error) else REFUSAL_LIMIT_S
                if self._stop.is_set() or time.monotonic() - began > limit_s:
                    raise
                if not waiting:
                    log.warning("waiting_for_the_dispatcher", shard=self._shard, reason=str(error))
                    waiting = True
                await asyncio.sleep(RETRY_S)
            else:
                self._known = known
                self._versions = dict(zip(known.rolling_out, known.versions, strict=True))
                return known
