"""Housekeeping of one shard in the background: segments merged, settled ones archived and removed."""

import asyncio
import time
from dataclasses import dataclass
from math import inf
from typing import Self

import numpy as np
import structlog

from bus.connection import Bus
from bus.errors import BusError, StorageError
from bus.requests import Unsettled, UnsettledRequest
from bus.waiting import set_within
from storage.config import ReplayConfig
from storage.store.archive import check_archive
from storage.store.layout import SegmentEntry
from storage.store.replay import ReplayStore

log = structlog.get_logger()
PERIOD_S = 10.0
ANSWER_TIMEOUT_S = 10.0


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


async def keep_house(bus: Bus, store: ReplayStore, retention: Retention, stop: asyncio.Event) -> None:
    """Merge and retire until `stop`. What fails is tried again later: storing goes on meanwhile."""
    while not stop.is_set():
        try:
            while not stop.is_set() and await asyncio.to_thread(store.compact):
                pass
            await retire_settled(bus, store, retention, stop)
        except (StorageError, BusError) as error:
            log.warning("replay_not_tidied", store=str(store.directory), reason=str(error))
        await set_within(stop, PERIOD_S)


async def retire_settled(bus: Bus, store: ReplayStore, retention: Retention, stop: asyncio.Event) -> None:
    """Archive and remove what is over the limits, as far as the dispatcher says that it is settled."""
    oldest_s = -inf if retention.retain_age_s is None else time.time() - retention.retain_age_s
    overdue = store.overdue(
        retain_bytes=retention.retain_bytes, oldest_s=oldest_s, settled=lambda entry: True
    )
    if not overdue:
        return
    present = set(store.entries)  # what comes later may hold leases that the answer does not know
    answer = await bus.request(
        bus.subject("rpc", "unsettled"), UnsettledRequest(), Unsettled, timeout_s=ANSWER_TIMEOUT_S
    )
    unsettled = np.array(answer.lease_ids, np.int64)

    def settled(entry: SegmentEntry) -> bool:
        return entry in present and not np.isin(unsettled, store.leases_of(entry)).any()

    chosen = await asyncio.to_thread(
        store.overdue, retain_bytes=retention.retain_bytes, oldest_s=oldest_s, settled=settled
    )
    for entry in chosen:
        if stop.is_set():
            return
        await asyncio.to_thread(store.retire, entry, retention.archive)
