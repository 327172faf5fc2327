"""Many engines behind one Engine: requests find a place, outlive engines, and keep all their tokens."""

import asyncio
import itertools
import secrets
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING

import numpy as np
import structlog
import xxhash

from actors.engines.announced_version import Published
from actors.engines.base import Generation, GenerationRequest, KvTokens, WorkCounts
from actors.engines.fleet.cache_use import total_of
from actors.engines.fleet.engine_state import HostWeights, ScoredTokens
from actors.engines.fleet.member import Build, Member
from actors.engines.fleet.pending_request import PendingRequest
from actors.settings.fleet import FleetConfig
from bus.codec import Json
from bus.errors import EngineError, EngineLostError, RequestRefusedError
from bus.images import PlacedImage

if TYPE_CHECKING:
    import torch


BLOCK = 32
"""Tokens. Beginnings are compared by whole blocks; a shorter one is not worth a detour."""
REMEMBERED = 1 << 16
"""Blocks: 2 million tokens."""


class Affinity:
    """Remembers which engine served each block of tokens last, and what precedes the block."""

    def __init__(self) -> None:
        self._holders: OrderedDict[int, str] = OrderedDict()

    def note(self, tokens: Sequence[int] | np.ndarray, holder: str) -> None:
        """`holder` has these tokens in its cache now."""
        for block in _blocks(tokens):
            self._holders[block] = holder
            self._holders.move_to_end(block)
        while len(self._holders) > REMEMBERED:
            self._holders.popitem(last=False)

    def holder(self, tokens: Sequence[int] | np.ndarray) -> str | None:
        """Return who has the longest known beginning of `tokens`."""
        found = None
        for block in _blocks(tokens):
            if block not in self._holders:
                break
            found = self._holders[block]
        return found

    def forget(self, holder: str) -> None:
        """The cache of `holder` is gone."""
        self._holders = OrderedDict((block, who) for block, who in self._holders.items() if who != holder)


def _blocks(tokens: Sequence[int] | np.ndarray) -> Iterator[int]:
    """Yield a hash for each whole block, which stands for all tokens up to its end."""
    data = np.asarray(tokens, np.int32)
    hashed = xxhash.xxh3_64()
    for start in range(0, len(data) - BLOCK + 1, BLOCK):
        hashed.update(data[start : start + BLOCK].tobytes())
        yield hashed.intdigest()


log = structlog.get_logger()


class Fleet:
    """Engines that come, fail, are built again and leave, while `generate` goes on.

    A request waits here until an engine has a free place. If that one fails or leaves, the request goes on
    elsewhere from its tokens so far, once the first engine has stopped working on it. Weights go to a part of
    the engines at a time, and an engine serves only when it has the newest that were given at its start."""

    def __init__(self, builds: Mapping[str, Build], config: FleetConfig) -> None:
        self.released = False
        self._config = config
        self._weights = HostWeights()
        self._members: dict[str, Member] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._affinity = Affinity()
        self._pending_by_id: dict[str, PendingRequest] = {}
        self._queue: list[PendingRequest] = []
        self._numbers = itertools.count()
        self._attempts = itertools.count()
        self._name = secrets.token_hex(4)
        """Random name. It has the same length in all fleets, so that no request id is a prefix of another."""
        self._updating = 0
        self._update_slot = asyncio.Condition()
        self._end: EngineError | None = None
        self._tokens_of_the_left = 0
        self._work_of_the_left = WorkCounts()
        self._busy_s_of_the_left = self._request_s_of_the_left = 0.0
        for name, build in builds.items():
            self._add(name, build)

    @property
    def policy_version(self) -> int:
        """Return the oldest version in service: new requests are sampled by no older one."""
        versions = (member.policy_version for member in self._members.values() if member.state == "serving")
        return min(versions, default=self._weights.policy_version)

    @property
    def serves(self) -> bool:
        return any(member.state == "serving" for member in self._members.values())

    @property
    def running(self) -> int:
        return sum(member.running for member in self._members.values())

    @property
    def waiting(self) -> int:
        """Return the number of requests accepted but not yet decoded, here or in an engine."""
        return len(self._queue) + sum(member.waiting for member in self._members.values())

    @property
    def tokens_generated(self) -> int:
        """Return the number of tokens sampled since the start, also by engines that are gone."""
        return self._tokens_of_the_left + sum(member.tokens_generated for member in self._members.values())

    @property
    def work_counts(self) -> WorkCounts:
        """Return what engines counted of their answers since the start, also those that are gone."""
        members = (member.work_counts for member in self._members.values())
        return reduce(WorkCounts.plus, members, self._work_of_the_left)

    @property
    def busy_s(self) -> float:
        """Return the seconds that engines had a request or more, added up over all engines that ever were."""
        here = sum(member.occupancy.busy_s for member in self._members.values())
        return self._busy_s_of_the_left + here

    @property
    def request_s(self) -> float:
        """Return the seconds that requests had a place at an engine, added up over all of them."""
        here = sum(member.occupancy.request_s for member in self._members.values())
        return self._request_s_of_the_left + here

    @property
    def longest_context(self) -> int | None:
        """Return the most tokens of a prompt and its answer together at any engine in service; None while
        one of them does not tell, or none serves."""
        told = [m.longest_context for m in self._members.values() if m.state == "serving"]
        known = [longest for longest in told if longest is not None]
        return max(known) if known and len(known) == len(told) else None

    @property
    def kv_tokens(self) -> KvTokens | None:
        """Return how full the caches of the engines in service are; None unless all of them tell."""
        return total_of(m.cache_use.kv_tokens for m in self._members.values() if m.state == "serving")

    @property
    def failure(self) -> str:
        """Return why the fleet has stopped for good; empty as long as it has not."""
        return str(self._end or "")

    @property
    def engines(self) -> dict[str, Json]:
        return {
            member.name: {
                "state": member.state,
                "running": member.running,
                "waiting": member.waiting,
                "policy_version": member.policy_version,
                "restarts": member.restarts,
                "starting": member.starting,
            }
            for member in self._members.values()
        }

    @property
    def starting(self) -> str:
        """Return what engines do before they serve, in words; empty where that is not known."""
        return ", ".join(dict.fromkeys(filter(None, (m.starting for m in self._members.values()))))

    async def start(self) -> None:
        """Start the engines; ready with the first that serves when all have been tried once. Raises
        EngineError when none can start, and ConfigError when that is for its settings."""
        for member in self._members.values():
            self._begin(member)
        for member in list(self._members.values()):
            await member.tried.wait()  # the member's timeouts bound this
        members = list(self._members.values())
        if members and not any(member.state in ("serving", "released") for member in members):
            await self.close()
            if error := next((member.misconfigured for member in members if member.misconfigured), None):
                raise error
            reasons = "; ".join(sorted({member.reason for member in members}))
            raise EngineError(f"none of {len(members)} engines could start: {reasons}")

    def fail(self, reason: str) -> None:
        """Take all engines out of service for a reason that none of them knows."""
        for member in self._members.values():
            member.fail(reason, of_requests=False)

    def join(self, name: str, build: Build) -> None:
        """Take in another engine, which serves when it has the current weights. Raises EngineError for a name
        that is in use."""
        self._refuse_when_ended()
        self._begin(self._add(name, build))

    async def leave(self, name: str) -> None:
        """Let an engine go: its requests go on elsewhere, and it is closed. Unknown names are ignored."""
        if member := self._members.get(name):
            member.leave()
            await asyncio.wait([self._tasks[name]])  # the member's timeouts bound this
            if member.state == "given up":
                self._forget(member)

    async def generate(self, request: GenerationRequest) -> Generation:
        """Continue `request`, on one engine after the other if need be. Cancelling the caller aborts it.
        Raises RequestRefusedError when no engine can ever serve it, EngineLostError when no engine is left,
        and EngineError when too many failed under it or the fleet was closed."""
        self._refuse_when_ended()
        if request.request_id in self._pending_by_id:
            raise RequestRefusedError(
                f"request {request.request_id} is already in flight: ids must be unique"
            )
        pending = self._pending_by_id[request.request_id] = PendingRequest(next(self._numbers), request)
        try:
            while pending.finish_reason is None:
                await self._attempt(pending)
            return pending.generation()
        finally:
            del self._pending_by_id[request.request_id]

    async def load_weights(self, state: Mapping[str, "torch.Tensor"], policy_version: int) -> float:
        """Bring the engines in service to these weights, `updated_at_once` of them at a time.

        After the first call `state` may hold only the tensors that changed since the call before. A call made
        while another is at work supersedes it: engines that have not taken the older version skip it. An
        engine that cannot take it is built again. Returns the longest time that one engine stood still, in
        seconds. Raises EngineLostError when no engine is left, and WeightsKeptError as engines do."""
        return await self._bring_to(self._weights.followed_by(state, policy_version))

    async def load_published(self, published: Published) -> float:
        """Have each engine get the announced tensors from the learner. Returns as `load_weights`. Raises
        `WeightsKeptError` when an engine could not, and goes on with those it has."""
        return await self._bring_to(self._weights.followed_by_published(published))

    async def score(
        self, sequences: Sequence[Sequence[int]], images: Sequence[Sequence[PlacedImage]] = ()
    ) -> dict[str, ScoredTokens]:
        """Return what each engine in service that can tell says of these tokens, by the engine's name.
        `images` are those of each sequence, or of none (`Scores`)."""
        members = list(self._members.values())
        found = await asyncio.gather(*(member.score(sequences, images) for member in members))
        return {
            member.name: scored for member, scored in zip(members, found, strict=True) if scored is not None
        }

    async def release(self) -> None:
        """Leave the device to others until `resume`: engines hand out their tokens and free it, none starts.
        Requests wait, and go on from their tokens. Returns when all is free; an engine that was starting is
        waited for, one that cannot free its device is closed."""
        self.released = True
        await asyncio.gather(*(member.release() for member in self._members.values()))

    async def resume(self) -> None:
        """Take the device back: engines serve again, with the newest weights."""
        self.released = False
        await asyncio.gather(*(member.resume() for member in self._members.values()))

    async def abort(self, request_id: str) -> None:
        """End one request now: its `generate` returns the tokens so far. Unknown ids are ignored."""
        pending = self._pending_by_id.get(request_id)
        if pending is None:
            return
        pending.aborted = True
        if pending.place is not None and not pending.place.done():
            pending.place.set_result(None)
        elif pending.member is not None and pending.attempt_id is not None:
            await pending.member.abort(pending.attempt_id)

    async def close(self) -> None:
        """Close all engines; requests in flight raise EngineError."""
        self._fail_all(EngineError("the fleet was closed"))
        for member in self._members.values():
            member.leave()
        if tasks := list(self._tasks.values()):
            await asyncio.wait(tasks)  # the members' timeouts bound this

    def _add(self, name: str, build: Build) -> Member:
        if name in self._members:
            raise EngineError(f"the fleet already has an engine named {name}: names must be unique")
        member = self._members[name] = Member(
            name, build, self._config, weights=lambda: self._weights, changed=partial(self._changed, name)
        )
        return member

    def _begin(self, member: Member) -> None:
        task = self._tasks[member.name] = asyncio.create_task(self._live(member), name=member.name)
        task.add_done_callback(partial(self._ended, member))

    async def _live(self, member: Member) -> None:
        if self.released:  # the member joined meanwhile
            await member.release()
        await member.live()

    def _ended(self, member: Member, task: asyncio.Task[None]) -> None:
        """An engine has left or was given up; anything else is a mistake in this program, and the end."""
        if not task.cancelled() and (error := task.exception()):
            log.error("fleet_failed", engine=member.name, exc_info=error)
            self._fail_all(EngineLostError(f"the fleet failed at {member.name}: {error!r}"))
        if member.state == "left":
            self._forget(member)
        self._dispatch()

    def _forget(self, member: Member) -> None:
        del self._members[member.name], self._tasks[member.name]
        self._tokens_of_the_left += member.tokens_generated
        self._work_of_the_left = self._work_of_the_left.plus(member.work_counts)
        self._busy_s_of_the_left += member.occupancy.busy_s
        self._request_s_of_the_left += member.occupancy.request_s
        self._affinity.forget(member.name)

    def _changed(self, name: str) -> None:
        if name in self._members and self._members[name].state == "stopping":
            self._affinity.forget(name)
        given_up = [other.reason for other in self._members.values() if other.state == "given up"]
        if given_up and all(other.has_ended for other in self._members.values()):
            self._fail_all(
                EngineLostError(
                    f"all engines failed more than {self._config.restarts} times within "
                    f"{self._config.restart_window_s:g} s, the last: {given_up[-1]}"
                )
            )
        self._dispatch()

    def _fail_all(self, error: EngineError) -> None:
        self._end = self._end or error
        for pending in self._queue:
            if pending.place is not None and not pending.place.done():
                pending.place.set_exception(self._end)

    def _refuse_when_ended(self) -> None:
        if self._end is not None:
            raise self._end

    async def _attempt(self, pending: PendingRequest) -> None:
        if pending.faults >= self._config.attempts:
            raise EngineError(
                f"{pending.request.request_id} failed {pending.faults} times, or its engines under it, "
                "at last with no other request there: it is what they fail of"
            )
        try:
            await self._wait_for_place(pending)
            if pending.member is not None and not pending.aborted:
                pending.attempt_id = f"{next(self._attempts)}-{self._name}-{pending.request.request_id}"
                await pending.member.work_on(pending)
                self._note_affinity(pending, pending.member)
        except RequestRefusedError as error:
            if pending.member is None:
                raise
            pending.refusals[pending.member.name] = error
        finally:
            if pending.member is not None:
                pending.member.remove_request(pending)
                pending.member = pending.attempt_id = None
                self._dispatch()

    async def _wait_for_place(self, pending: PendingRequest) -> None:
        self._refuse_when_ended()
        pending.place = asyncio.get_running_loop().create_future()
        insort(self._queue, pending, key=lambda waiting: waiting.number)
        try:
            self._dispatch()
            await pending.place
        finally:
            if pending in self._queue:
                self._queue.remove(pending)

    def _dispatch(self) -> None:
        """Give places to waiting requests, the oldest first, as far as caches have room for their contexts. A
        request under which engines have failed waits for a place among few enough others; nobody younger goes
        to the least busy engine meanwhile, or it would never be less so."""
        for pending in [pending for pending in self._queue if pending.refusals]:
            self._refuse_for_good(pending)
        kept_free: Member | None = None
        for pending in list(self._queue):
            free = [m for m in self._members.values() if m.has_capacity() and m is not kept_free]
            if not free:
                return
            if pending.place is None or pending.place.done():
                continue
            request_limit = self._config.requests_after(pending.failures)
            open_to_it = [member for member in free if member.load < request_limit]
            if not open_to_it and kept_free is None:
                able = (member for member in free if member.name not in pending.refusals)
                kept_free = min(able, key=lambda member: member.load, default=None)
            elif open_to_it and not (open_to_it := [m for m in open_to_it if m.cache_use.takes(pending)]):
                return  # shorter contexts would keep it waiting for ever
            elif member := self._choose(pending, open_to_it):
                self._queue.remove(pending)
                pending.member = member
                member.add_request(pending)
                self._note_affinity(pending, member)
                pending.place.set_result(None)

    def _choose(self, pending: PendingRequest, free: Iterable[Member]) -> Member | None:
        """Return the least busy member, unless another has the prompt's beginning and is not much busier."""
        able = {member.name: member for member in free if member.name not in pending.refusals}
        if not able:
            return None
        least = min(able.values(), key=lambda member: (member.load, member.served))
        held = able.get(self._affinity.holder(pending.beginning) or "") if len(able) > 1 else None
        if held and held.load - least.load <= self._config.affinity_slack:
            return held
        return least

    def _note_affinity(self, pending: PendingRequest, member: Member) -> None:
        if member.state == "serving" and len(self._members) > 1:
            self._affinity.note(pending.beginning, member.name)

    def _refuse_for_good(self, pending: PendingRequest) -> None:
        """Refuse a request that no engine takes, not even one that is being built."""
        left = [member for member in self._members.values() if not member.has_ended]
        if pending.place is None or pending.place.done() or not left:
            return
        if all(member.name in pending.refusals for member in left):
            pending.place.set_exception(pending.refusals[left[0].name])

    async def _bring_to(self, weights: HostWeights) -> float:
        """Update the engines in service; when one keeps what it has, it is said after all have been asked."""
        self._refuse_when_ended()
        self._weights = weights
        serving = [member for member in self._members.values() if member.state == "serving"]
        updates = [asyncio.create_task(self._update(member)) for member in serving]
        await asyncio.gather(*updates, return_exceptions=True)
        self._refuse_when_ended()
        return max((update.result() for update in updates), default=0.0)

    async def _update(self, member: Member) -> float:
        """Update one engine when a slot is free; one that has no weights yet needs no slot."""
        needs_slot = member.policy_version >= 0
        if needs_slot:
            async with self._update_slot:
                await self._update_slot.wait_for(lambda: self._updating < self._at_once)
                self._updating += 1
        try:
            return await member.update()
        finally:
            if needs_slot:
                self._updating -= 1
                async with self._update_slot:
                    self._update_slot.notify_all()
            self._dispatch()  # with first weights a member may serve

    @property
    def _at_once(self) -> int:
        serving = sum(member.state == "serving" for member in self._members.values())
        return max(1, int(self._config.updated_at_once * serving))
