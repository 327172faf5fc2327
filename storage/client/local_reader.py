"""Reads trajectories of a shard on the same host by mapping its segments, so that nothing travels."""

import asyncio
import threading
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import structlog

from bus.connection import Bus
from bus.errors import BusError, StorageError
from bus.requests import Located, LocateRequest
from bus.trajectory import Trajectory
from storage.disk.host_identity import host_identity
from storage.store.addresses import directory_identity
from storage.store.image_blobs import KnownImages
from storage.store.layout import MappedSegments, SegmentEntry
from storage.store.segments import Segment, check_segment

log = structlog.get_logger()
ANSWER_TIMEOUT_S = 10.0
ATTEMPTS = 2
"""Attempts to read; a second one is needed when segments were merged or retired after the answer."""
MAPPED_SEGMENTS = 32

_Version = tuple[str, int, int]
"""Path, inode and time of change of a segment, since another segment may have taken its name."""


class LocalReader:
    """Asks each shard where its trajectories lie, and reads them there if the shard is on this host.

    It returns copies, so that no mapping outlives `close`, however long a batch is kept."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._host = host_identity()
        self._mapped: MappedSegments[_Version] = MappedSegments(MAPPED_SEGMENTS)
        self._mutex = threading.Lock()  # for the mapped segments
        self._complaints: dict[int, str] = {}

    async def read(self, shard: int, lease_ids: Sequence[int]) -> list[Trajectory] | None:
        """Read the trajectories of these complete groups, each group in the order of its samples.

        Returns None if they must come over the bus: the shard is elsewhere, or its files are no use here."""
        for attempt in range(ATTEMPTS):
            try:
                where = await self._locate(shard, lease_ids)
                if not self._host or where.host != self._host:
                    return None
                found = await asyncio.to_thread(self._read_mapped, where, list(lease_ids))
            except BusError as error:  # the request over the bus will say why
                log.debug("shard_does_not_locate", shard=shard, reason=str(error))
                return None
            except StorageError as error:
                if attempt + 1 == ATTEMPTS:
                    self._complain(shard, str(error))
            else:
                self._complaints.pop(shard, None)
                return found
        return None

    def close(self) -> None:
        """Unmap everything."""
        with self._mutex:
            self._mapped.close()

    async def _locate(self, shard: int, lease_ids: Sequence[int]) -> Located:
        return await self._bus.request(
            self._bus.subject("rpc", "locate", shard),
            LocateRequest(lease_ids=tuple(lease_ids), host=self._host),
            Located,
            timeout_s=ANSWER_TIMEOUT_S,
        )

    def _complain(self, shard: int, reason: str) -> None:
        """Log why files cannot be used, once and not at every step."""
        if self._complaints.get(shard) != reason:
            self._complaints[shard] = reason
            log.warning("replay_not_mapped", shard=shard, reason=reason)

    def _read_mapped(self, where: Located, leases: Sequence[int]) -> list[Trajectory]:
        """Read from the files. Raises `StorageError` when they cannot be read or differ from the answer."""
        directory = Path(where.directory)
        if directory_identity(directory) != (where.device, where.inode):
            raise StorageError(f"{directory} is not the directory here that it is for its shard")
        found: dict[int, Trajectory] = {}
        rows = where.rows.tolist()
        known: KnownImages = {}
        with self._mutex:
            for number, name in enumerate(where.segments):  # in turn, or one would evict another
                segment = self._segment(directory, name)
                for at in np.flatnonzero(where.segment_of == number).tolist():
                    found[at] = segment.trajectory(rows[at], copied=True, known=known)
        ordered = [found[at] for at in range(len(rows))]
        if not are_groups(ordered, leases):
            raise StorageError(f"{directory} holds other groups than its shard says")
        return ordered

    def _segment(self, directory: Path, name: str) -> Segment:
        path = directory / name
        if SegmentEntry.parse(path).retired:
            raise StorageError(f"{path} is no segment")
        try:
            found = path.stat()
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error}") from error
        version = str(path), found.st_ino, found.st_mtime_ns

        def checked() -> Segment:
            check_segment(path)
            return Segment(path)

        return self._mapped.get(version, checked)


def are_groups(found: Sequence[Trajectory], leases: Sequence[int]) -> bool:
    """Return whether these are trajectories of groups of these leases in their order, each sample once."""
    groups = [(lease, [t.sample for t in group]) for lease, group in groupby(found, key=lambda t: t.lease_id)]
    in_order = all(samples == sorted(set(samples)) for _, samples in groups)
    return in_order and [lease for lease, _ in groups] == list(leases)
