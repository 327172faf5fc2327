"""Housekeeping of one shard in the background: segments are merged, settled ones forgotten and removed.

The dispatcher is asked what is settled while there is something to remove: segments over the limits, many
trajectories in memory, or turns, whose leases may have been rejected."""

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Self

import numpy as np
import structlog

from bus.connection import Bus
from bus.errors import BusError, StorageError
from bus.requests import Unsettled, UnsettledRequest
from bus.waiting import set_within
from storage.settings.replay import ReplayConfig
from storage.store.archive import check_archive
from storage.store.layout import SegmentEntry, choose_retirement
from storage.store.replay import ReplayStore

log = structlog.get_logger()
PERIOD_S = 10.0
ANSWER_TIMEOUT_S = 10.0
ROWS_IN_MEMORY = 256
"""Trajectories in memory from which a shard asks which of them it may forget."""


@dataclass(frozen=True)
class Retention:
    """How long a shard keeps trajectories that nobody will train on again."""

    retain_bytes: int | None = None
    """Bytes of segments that this shard keeps; None keeps all."""
    retain_age_s: float | None = None
    """Age since they were written at which segments are removed; None keeps all."""
    archive: str | None = None
    """Directory or fsspec URL where segments go before they are removed; None removes them for good."""

    @classmethod
    def of_shard(cls, replay: ReplayConfig, run: str) -> Self:
        """Return what each shard of a run keeps."""
        return cls(
            retain_bytes=None if replay.retain_bytes is None else replay.retain_bytes // replay.shards,
            retain_age_s=replay.retain_age_s,
            archive=None if replay.archive is None else f"{replay.archive.rstrip('/')}/{run}",
        )

    async def check(self) -> None:
        """Raise `ConfigError` for an archive that cannot be used."""
        if self.archive is not None:
            await asyncio.to_thread(check_archive, self.archive)


async def keep_house(
    bus: Bus, store: ReplayStore, retention: Retention, stop: asyncio.Event, *, shard: int
) -> None:
    """Merge, forget and retire until `stop`. What fails is tried again later: storing goes on meanwhile."""
    while not stop.is_set():
        try:
            while not stop.is_set() and await asyncio.to_thread(store.compact):
                pass
            await let_go_of_settled(bus, store, retention, stop, shard=shard)
        except (StorageError, BusError) as error:
            log.warning("replay_not_tidied", store=str(store.directory), reason=str(error))
        await set_within(stop, PERIOD_S)


async def let_go_of_settled(
    bus: Bus, store: ReplayStore, retention: Retention, stop: asyncio.Event, *, shard: int
) -> None:
    """Forget what the dispatcher says is settled, and archive and remove what is over the limits of it."""
    oldest_s = -inf if retention.retain_age_s is None else time.time() - retention.retain_age_s
    choose = partial(choose_retirement, retain_bytes=retention.retain_bytes, oldest_s=oldest_s)
    over = choose(store.entries, settled=lambda entry: True)
    if not over and not store.turns and store.rows_in_memory < ROWS_IN_MEMORY:
        return
    present = set(store.entries)  # what comes later may hold leases that the answer does not know
    subject, request = bus.subject("rpc", "unsettled"), UnsettledRequest(shard=shard)
    answer = await bus.request(subject, request, Unsettled, timeout_s=ANSWER_TIMEOUT_S)
    await asyncio.to_thread(store.settle, answer.next_id, answer.lease_ids, seen=answer.seen)
    unsettled = np.array(answer.lease_ids, np.int64)

    def settled(entry: SegmentEntry) -> bool:
        within = unsettled[(unsettled >= entry.leases.start) & (unsettled < entry.leases.stop)]
        needed = len(within) and np.isin(within, store.leases_of(entry)).any()
        return entry in present and not needed

    for entry in await asyncio.to_thread(choose, store.entries, settled=settled):
        if stop.is_set():
            return
        await asyncio.to_thread(store.retire, entry, retention.archive)
