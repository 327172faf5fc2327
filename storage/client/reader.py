"""The learner's side of storage: lease the groups of a step, fetch their trajectories, commit, resume.

Trajectories are read from the files of a shard on the same host, and come over the bus from any other."""

import asyncio
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import structlog

from bus.codec import Message
from bus.connection import Bus
from bus.errors import BusAwayError, BusError, StorageError, UnreadableGroupsError
from bus.requests import (
    BatchLease,
    BatchRequest,
    Done,
    GroupRef,
    GroupsUnreadable,
    LearnerResumed,
    Located,
    LocateRequest,
    ReadRequest,
    StepCommitted,
    StepGroups,
    StepGroupsRequest,
    Waiting,
)
from bus.trajectory import Trajectory, TrajectoryBatch
from bus.waiting import is_away
from storage.client.expert_reader import ExpertReader
from storage.disk.host_identity import host_identity
from storage.store.addresses import directory_identity
from storage.store.image_blobs import KnownImages
from storage.store.layout import MappedSegments, SegmentEntry
from storage.store.segments import Segment, check_segment

log = structlog.get_logger()
R = TypeVar("R", bound=Message)
ANSWER_TIMEOUT_S = 10.0
RETRY_S = 0.5
REFUSAL_LIMIT_S = 120.0
"""Seconds for which storage may refuse: what a restart of its processes mends is mended by then."""


def _unheard(reason: str) -> None:
    """Ignore what a fetch waits for."""


class ReplayReader:
    """Reads the replay of a run, for one incarnation of its learner."""

    def __init__(self, bus: Bus, incarnation: str, *, read: Literal["auto", "bus"] = "auto") -> None:
        self.read: Counter[str] = Counter()
        """Counts of trajectories that were `mapped` or came over the `bus`, and of their bytes (`_bytes`)."""
        self._bus = bus
        self._incarnation = incarnation
        self._experts = ExpertReader(bus)
        self._local = LocalReader(bus) if read == "auto" else None

    def close(self) -> None:
        """Unmap the files. The reader can still be used."""
        if self._local is not None:
            self._local.close()

    async def lease(self, step: int, policy_version: int, *, on_wait: Callable[[str], None]) -> BatchLease:
        """Lease the groups that `step` trains on. Asking again gives the same groups; nothing is fetched yet.

        Raises `BusAwayError` when storage is silent for `Bus.patience_s`, `BusError` when it refuses for
        `REFUSAL_LIMIT_S`, `FencedError` when another learner took over, and `NoActorsError` when the actors
        have ended by what no restart mends."""
        request = BatchRequest(step=step, policy_version=policy_version, incarnation=self._incarnation)
        subject = self._bus.subject("rpc", "batch")
        heard, alarm = time.monotonic(), ""
        while True:
            try:
                answer: Message = await self._bus.request(
                    subject, request, BatchLease, Waiting, timeout_s=ANSWER_TIMEOUT_S
                )
                if isinstance(answer, BatchLease):
                    return self._own(answer, step)
                if isinstance(answer, Waiting):
                    on_wait(answer.alarm or answer.reason)
                    if answer.alarm and answer.alarm != alarm:
                        log.error("groups_do_not_come", step=step, reason=answer.alarm)
                    alarm = answer.alarm
                heard = time.monotonic()
            except BusError as error:
                self._raise_if_late(error, heard)
                on_wait(f"storage does not answer: {error}")
                await asyncio.sleep(RETRY_S)

    def _own(self, lease: BatchLease, step: int) -> BatchLease:
        """Return what was asked for. Raises `BusError` for the groups of another step or learner."""
        if (lease.step, lease.given_to) != (step, self._incarnation):
            raise BusError(
                f"storage was asked for step {step} by {self._incarnation!r} and gives step {lease.step} to "
                f"{lease.given_to!r}"
            )
        return lease

    async def fetch(
        self, refs: Sequence[GroupRef], *, on_wait: Callable[[str], None] = _unheard
    ) -> list[list[Trajectory]]:
        """Fetch the trajectories of each group, in the order of `refs`, which may be a part of a lease.

        Every rank of a learner may fetch its own. Raises as `lease` does, and
        `UnreadableGroupsError` at once for groups that are damaged or were retired."""
        by_shard: defaultdict[int, list[int]] = defaultdict(list)
        for ref in refs:
            by_shard[ref.shard].append(ref.lease_id)
        answers = await asyncio.gather(
            *(self._read(shard, leases, on_wait) for shard, leases in by_shard.items())
        )
        siblings: defaultdict[int, list[Trajectory]] = defaultdict(list)
        for trajectory in (t for answer in answers for t in answer):
            siblings[trajectory.lease_id].append(trajectory)
        return [siblings[ref.lease_id] for ref in refs]

    async def committed(self, step: int) -> None:
        """Tell storage that a durable checkpoint holds every step up to `step`."""
        await self._ask("committed", StepCommitted(step=step, incarnation=self._incarnation), Done)

    async def report_unreadable(self, step: int, error: UnreadableGroupsError, given_to: str) -> None:
        """Have storage give up what cannot be read: the next `lease` of `step` has others in its place."""
        report = GroupsUnreadable(
            step=step, lease_ids=error.lease_ids, incarnation=given_to, reason=str(error)
        )
        await self._ask("unreadable", report, Done)

    async def resumed(self, step: int) -> None:
        """Tell storage that training goes on from `step`: what was leased for later steps is free again."""
        await self._ask("resumed", LearnerResumed(step=step, incarnation=self._incarnation), Done)

    async def given(self, step: int) -> StepGroups:
        """Return the groups that `step` was given, to this learner or another one. Changes nothing."""
        return await self._ask("step_groups", StepGroupsRequest(step=step), StepGroups)

    async def _ask(self, what: str, message: Message, expected: type[R]) -> R:
        subject = self._bus.subject("rpc", what)
        began = time.monotonic()
        while True:
            try:
                return await self._bus.request(subject, message, expected, timeout_s=ANSWER_TIMEOUT_S)
            except BusError as error:
                self._raise_if_late(error, began)
                await asyncio.sleep(RETRY_S)

    async def _read(
        self, shard: int, lease_ids: list[int], on_wait: Callable[[str], None]
    ) -> list[Trajectory]:
        began = time.monotonic()
        while True:
            try:
                found = await self._local.read(shard, lease_ids) if self._local is not None else None
                way = "bus" if found is None else "mapped"
                if found is None:
                    found = await self._receive(shard, lease_ids)
            except BusError as error:
                self._raise_if_late(error, began)
                on_wait(f"shard {shard} does not answer: {error}")
                await asyncio.sleep(RETRY_S)
            else:
                self.read[way] += len(found)
                self.read[f"{way}_bytes"] += sum(map(_size_bytes, found))
                return found

    def _raise_if_late(self, error: BusError, heard: float) -> None:
        """Raise when nothing useful came since `heard` for too long: a refusal is believed sooner."""
        silent_s = time.monotonic() - heard
        if is_away(error) and silent_s > self._bus.patience_s:
            raise BusAwayError(f"storage did not answer for {silent_s:.0f} s: {error}") from error
        if not is_away(error) and silent_s > REFUSAL_LIMIT_S:
            raise error

    async def _receive(self, shard: int, lease_ids: list[int]) -> list[Trajectory]:
        if self._experts.reads(shard):
            batches = await self._answers(shard, lease_ids, apart=True)
            try:
                batches = await self._experts.whole(shard, batches)
            except BusError as error:
                batches = await self._answers(shard, lease_ids, apart=False)
                self._experts.avoid(shard, error)  # not where a group was retired meanwhile
        else:
            batches = await self._answers(shard, lease_ids, apart=False)
        found = [trajectory for batch in batches for trajectory in batch.whole]
        if not are_groups(found, lease_ids):
            raise BusError(f"shard {shard} was asked for groups {lease_ids} and answers others")
        return found

    async def _answers(self, shard: int, lease_ids: list[int], *, apart: bool) -> list[TrajectoryBatch]:
        return await self._bus.request_many(
            self._bus.subject("rpc", "read", shard),
            ReadRequest(lease_ids=tuple(lease_ids), apart=apart),
            TrajectoryBatch,
            timeout_s=ANSWER_TIMEOUT_S,
        )


def _size_bytes(trajectory: Trajectory) -> int:
    t = trajectory
    arrays = (t.token_ids, t.loss_mask, t.behaviour_logprobs, t.policy_versions)
    return sum(array.nbytes for array in arrays)


ATTEMPTS = 2
"""Attempts to read; a second one is needed when segments were merged or retired after the answer."""
MAPPED_SEGMENTS = 32
_Version = tuple[str, int, int]
"""Path, inode and time of change of a segment, since another segment may have taken its name."""


class LocalReader:
    """Asks each shard where its trajectories lie, and reads them there if the shard is on this host. It
    returns copies, so that no mapping outlives `close`, however long a batch is kept."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._host = host_identity()
        self._mapped: MappedSegments[_Version] = MappedSegments(MAPPED_SEGMENTS)
        self._mutex = threading.Lock()  # for the mapped segments
        self._complaints: dict[int, str] = {}

    async def read(self, shard: int, lease_ids: Sequence[int]) -> list[Trajectory] | None:
        """Read the trajectories of these complete groups, each group in the order of its samples. Returns
        None if they must come over the bus: the shard is elsewhere, or its files are no use here."""
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
