"""`launch shards`: some replay shards of a run in a process of their own, on any host that has the bus.

`launch storage` runs those that it keeps itself by the same means."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass

import structlog

from bus.codec import Json
from bus.connection import Bus
from bus.connection.roles import guarded, hold_role
from bus.connection.status import Activity, report_status
from bus.errors import BusError, ConfigError
from bus.process.process_tuning import paced
from bus.requests import Issued, IssuedRequest
from bus.waiting import RETRY_S, is_away
from storage.disk.run_directory import RunDirectory
from storage.settings.replay import ReplayConfig
from storage.shard.ingest_checks import Quarantine
from storage.shard.routed_experts import ExpertServer
from storage.shard.server import Shard
from storage.store.replay import ReplayStore
from storage.store.retention import Retention, keep_house
from storage.store.settled import refuse_older_ledger

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


log = structlog.get_logger()


@dataclass(frozen=True)
class ShardsSettings:
    """What a process that keeps some of a run's shards needs to know."""

    numbers: tuple[int, ...]
    replay: ReplayConfig
    run: RunDirectory


@dataclass(frozen=True)
class HeldShard:
    """A shard whose only writer this process is."""

    number: int
    store: ReplayStore
    renewing: asyncio.Task[None]
    """Ends with `FencedError` when another process takes the shard over."""


@asynccontextmanager
async def hold_shards(
    bus: Bus, run: RunDirectory, replay: ReplayConfig, numbers: Sequence[int]
) -> AsyncIterator[list[HeldShard]]:
    """Be the only writer of these shards while inside, by their roles in the run and by their files' locks,
    and take routed experts for them.

    Raises `ConfigError`, perhaps in a group, naming the process that has one already, and `StorageError` for
    a store that cannot be opened."""
    incarnation = secrets.token_hex(4)
    async with AsyncExitStack() as stack:
        stack.enter_context(paced())

        async def hold(number: int) -> HeldShard:
            role = hold_role(bus, f"shard-{number}", incarnation)
            renewing = await stack.enter_async_context(role)
            store = await asyncio.to_thread(ReplayStore.open, run.replay(number))
            return HeldShard(number, stack.enter_context(closing(store)), renewing)

        async with asyncio.TaskGroup() as tasks:  # a dead holder's silence is awaited for all at once
            holding = [tasks.create_task(hold(number), name=f"hold shard {number}") for number in numbers]
        held = [task.result() for task in holding]
        stores = {one.number: one.store for one in held}
        taking = ExpertServer(bus, stores, replay.server, bus.topology.trajectories_bytes(replay.shards))
        await stack.enter_async_context(taking.serving())
        yield held


async def run_shard(
    bus: Bus, held: HeldShard, shard: Shard, retention: Retention, stop: asyncio.Event
) -> None:
    """Store, answer and keep house until `stop`; raises `FencedError` once another process has the shard."""

    async def work() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(shard.run(stop), name=f"shard {held.number}")
            house = keep_house(bus, held.store, retention, stop, shard=held.number)
            tasks.create_task(house, name=f"keep {held.store.directory.name}")

    await guarded(work(), held.renewing)


async def run_shards(bus: Bus, settings: ShardsSettings, stop: asyncio.Event) -> None:
    """Keep these shards until `stop`. The run's `launch storage` dispatches, and has made the streams."""
    _refuse_missing(settings)
    retention = Retention.of_shard(settings.replay, settings.run.name)
    await retention.check()
    async with (
        hold_shards(bus, settings.run, settings.replay, settings.numbers) as held,
        asyncio.TaskGroup() as reporting,
    ):
        finished, serving = asyncio.Event(), asyncio.Event()
        source = f"shards-{'-'.join(map(str, settings.numbers))}"
        reporting.create_task(
            report_status(
                bus,
                source=source,
                role="shards",
                look=lambda: _look(held),
                stop=finished,
                waits_for=lambda: "" if serving.is_set() else "the dispatcher: is `launch storage` running?",
            )
        )
        try:
            async with asyncio.TaskGroup() as parts:
                for one in held:
                    shard = await _remote(bus, one, settings.replay, stop)
                    parts.create_task(run_shard(bus, one, shard, retention, stop))
                    await shard.serving.wait()
                serving.set()
                log.info("shards_ready", shards=list(settings.numbers), run=settings.run.name)
        finally:
            finished.set()


async def _remote(bus: Bus, held: HeldShard, replay: ReplayConfig, stop: asyncio.Event) -> Shard:
    issued = IssuedLeases(bus, held.number, stop)
    await issued.refuse_other_run(held.store)
    return Shard(
        bus,
        held.store,
        held.number,
        shards=replay.shards,
        was_issued=issued.was_issued,
        linger_s=replay.linger_s,
        hear_of=issued.hear_of,
        quarantine=Quarantine(issued),
    )


def _refuse_missing(settings: ShardsSettings) -> None:
    if (last := max(settings.numbers)) >= settings.replay.shards:
        raise ConfigError(
            f"run {settings.run.name!r} has no shard {last}: replay.shards is {settings.replay.shards}, so "
            f"there are 0 to {settings.replay.shards - 1}"
        )


def _look(held: Sequence[HeldShard]) -> Activity:
    stored = {str(one.number): one.store.trajectories for one in held}
    values: dict[str, Json] = {
        "trajectories_stored": sum(stored.values()),
        "stored_bytes": sum(one.store.size_bytes for one in held),
        "trajectories_by_shard": dict(stored),
    }
    return Activity(f"keeping shards {', '.join(stored)}", values)
