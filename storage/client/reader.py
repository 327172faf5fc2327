"""The learner's side of storage: lease the groups of a step, fetch their trajectories, commit, resume.

Trajectories are read from the files of a shard on the same host, and come over the bus from any other.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import structlog

from bus.codec import Message
from bus.connection import Bus
from bus.errors import BusAwayError, BusError, UnreadableGroupsError
from bus.requests import (
    BatchLease,
    BatchRequest,
    Done,
    GroupRef,
    GroupsUnreadable,
    LearnerResumed,
    ReadRequest,
    StepCommitted,
    StepGroups,
    StepGroupsRequest,
    Waiting,
)
from bus.trajectory import Trajectory, TrajectoryBatch
from bus.waiting import is_away
from storage.client.local_reader import LocalReader, are_groups

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
        self._local = LocalReader(bus) if read == "auto" else None

    def close(self) -> None:
        """Unmap the files. The reader can still be used."""
        if self._local is not None:
            self._local.close()

    async def lease(self, step: int, policy_version: int, *, on_wait: Callable[[str], None]) -> BatchLease:
        """Lease the groups that `step` trains on. Asking again gives the same groups; nothing is fetched yet.

        Raises `BusAwayError` when storage is silent for `Bus.patience_s`, `BusError` when it refuses for
        `REFUSAL_LIMIT_S`, `FencedError` when another learner took over, and `NoActorsError` when the actors
        have ended by what no restart mends.
        """
        request = BatchRequest(step=step, policy_version=policy_version, incarnation=self._incarnation)
        subject = self._bus.subject("rpc", "batch")
        heard, alarm = time.monotonic(), ""
        while True:
            try:
                answer: Message = await self._bus.request(
                    subject, request, BatchLease, Waiting, timeout_s=ANSWER_TIMEOUT_S
                )
                if isinstance(answer, BatchLease):
                    return answer
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

    async def fetch(
        self, refs: Sequence[GroupRef], *, on_wait: Callable[[str], None] = _unheard
    ) -> list[list[Trajectory]]:
        """Fetch the trajectories of each group, in the order of `refs`, which may be a part of a lease.

        Every rank of a learner may fetch its own. Raises as `lease` does, and
        `UnreadableGroupsError` at once for groups that are damaged or were retired.
        """
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
        """Ask until storage answers, since it may be restarting. Raises as `lease` does."""
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
        """Read these groups from a shard, which may be restarting."""
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
        batches = await self._bus.request_many(
            self._bus.subject("rpc", "read", shard),
            ReadRequest(lease_ids=tuple(lease_ids)),
            TrajectoryBatch,
            timeout_s=ANSWER_TIMEOUT_S,
        )
        found = [trajectory for batch in batches for trajectory in batch.whole]
        if not are_groups(found, lease_ids):
            raise BusError(f"shard {shard} was asked for groups {lease_ids} and answers others")
        return found


def _size_bytes(trajectory: Trajectory) -> int:
    t = trajectory
    arrays = (t.token_ids, t.loss_mask, t.behaviour_logprobs, t.policy_versions)
    return sum(array.nbytes for array in arrays)
