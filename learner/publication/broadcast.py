"""Weights for engines in the learner's cluster: sent to each in a group of its own, or to all in one, beside
training.

What is sent is a copy of the version announced last, taken when an engine asks. Each group has a process
(`learner/publication/broadcast_process.py`): a group that hangs or fails ends with it, and touches nothing
else."""

import asyncio
import json
import math
import os
import secrets
import signal
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

import structlog
import torch

from bus.codec import Message
from bus.connection import Bus
from bus.errors import BusError
from bus.process.child_process import module_command
from bus.requests import Done
from bus.waiting import cancelled, set_within
from bus.weight_requests import (
    GROUP_BEAT_S,
    BroadcastBegin,
    BroadcastEnd,
    BroadcastWanted,
    GroupBeat,
    GroupLeft,
    OfferedBucket,
    SignedOffer,
    WeightOffer,
)
from learner.publication.shared_copy import Memory, SharedCopy, WeightBucket
from storage.weights.blob_http import own_address
from storage.weights.tensors import Weights

log = structlog.get_logger()
AS_SGLANG = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""Settings of NCCL that SGLang gives its servers: ranks that share memory in different ways fail in CUDA."""
Line = dict[str, Any]
Announced = Callable[[], Weights | None]
START_S = 120.0
"""Time limit for a process of ours to load torch, and then to map and lock what it is to send."""
IDLE_S = 900.0
"""A group is given up after so many seconds without a broadcast."""
ASKING_S = 1.0
"""Seconds in which engines that are sent to together ask, from the first one on."""
READY_S = 5.0
"""Seconds for which engines that are ready to receive wait for the others of their group."""
CONNECT_S = 5.0
"""Seconds from an offer in which an engine connects to its new group. One that has connected hears of the
group's end; one that comes later tries again as long as it may, and stands still meanwhile."""
SILENT_S = 10.0
"""Seconds without a sign of life after which an engine's actor counts as dead, and its group is given up."""
SPARES = 2
"""Copies that are in use at a time, of a version and, where engines are slow, of the one before."""
COPIES = 3
"""Attempts at a copy of weights that are replaced meanwhile."""


class Broadcaster:
    """Answers engines that ask for the announced weights, and sends these; waits for no engine otherwise."""

    def __init__(
        self, bus: Bus, announced: Announced, *,
        incarnation: str, timeout_s: float, threads: int = 1, device_bytes: int = 0, hashed: bool = True,
        together: bool = False,
    ) -> None:  # fmt: skip
        """`announced` returns the newest weights: their tensors stay as they are until it returns others.
        `threads` copy these; each group may have `device_bytes` of them on our GPU before it sends them. On a
        secured bus they are `hashed`, for engines to check. With `together` engines that ask at about the
        same time are one group."""
        self._hashed = hashed and bus.secured
        self._together = together
        self._asking: dict[str, _Asking] = {}
        """Engines of each kind of device that wait for others to ask."""
        self._bus = bus
        self._announced = announced
        self._incarnation = incarnation
        self._timeout_s = timeout_s
        self._threads = threads
        self._device_bytes = device_bytes
        self._groups: dict[str, _Group] = {}
        self._living: set[asyncio.Task[None]] = set()
        """Tasks of the groups, also of those that are being ended."""
        self._newest: SharedCopy | None = None
        self._spares: list[Memory] = []
        """Memory of copies that nobody needs, the latest last; senders keep it mapped and locked."""
        self._copying = asyncio.Lock()
        self._closed = False

    async def start(self) -> None:
        serve, subject = self._bus.serve, self._bus.subject
        await serve(subject("broadcast", "wanted"), BroadcastWanted, self._offer)
        await serve(subject("broadcast", "begin"), BroadcastBegin, self._begin)
        await serve(subject("broadcast", "end"), BroadcastEnd, self._end)
        await self._bus.listen(subject("broadcast", "left"), GroupLeft, self._on_left)
        await self._bus.listen(subject("broadcast", "beat"), GroupBeat, self._on_beat)

    async def close(self) -> None:
        self._closed = True
        for group in list(self._groups.values()):
            group.living.cancel()
        if self._living:
            await asyncio.wait(self._living)  # these tasks kill what they wait for

    async def _offer(self, wanted: BroadcastWanted) -> list[Message]:
        """Make a copy and a group, unless they are there, and it ready to send at once. Raises `BusError`
        where that cannot be."""
        if wanted.incarnation == self._incarnation:
            await self._announced_since(wanted.policy_version)  # or askers beside this engine get nothing
        if wanted.incarnation != self._incarnation or self._closed:
            raise BusError(f"the weights of learner {wanted.incarnation} are not to be had from this one")
        asking = self._asking.get(wanted.device) or _Asking()
        asking.wanted.append(wanted)
        if self._together:
            self._asking[wanted.device] = asking
        if self._all_ask(asking.wanted):
            asking.all_here.set()
        asking.answer = asking.answer or asyncio.create_task(self._group_for(asking), name="group of engines")
        group = await asyncio.shield(asking.answer)
        offer = WeightOffer(nonce=wanted.nonce, buckets=group.offer(wanted))
        return [SignedOffer(record=self._bus.sealed(self._bus.subject("broadcast", "offer"), offer)), Done()]

    def _all_ask(self, wanted: "Sequence[BroadcastWanted]") -> bool:
        """Return whether nobody else is to be waited for: every engine that is in a group already asks."""
        known = {(g.name, rank) for g in self._groups.values() for rank in g.ranks}
        return not self._together or (bool(known) and known <= {(w.group, w.first_rank) for w in wanted})

    async def _group_for(self, asking: "_Asking") -> "_Group":
        """Return the group of these engines, ready to send the newest version: the one that they are in, if
        they are all of it, or a new one."""
        if not await set_within(asking.all_here, ASKING_S):
            log.debug("engines_ask_no_more", engines=len(asking.wanted))
        wanted = tuple(asking.wanted)
        self._asking = {device: other for device, other in self._asking.items() if other is not asking}
        copy = await self._newest_copy(max(one.policy_version for one in wanted))
        group = self._groups.get(wanted[0].group)
        if group is not None and group.is_of(wanted):
            await self._make_ready(group, copy)
        else:
            for left in {one.group for one in wanted} & self._groups.keys():
                self._groups[left].living.cancel()  # the others of it ask again
            group = await self._new_group(wanted, copy)
        group.copy, group.ready, group.all_ready = copy, set(), asyncio.Event()
        group.offered_s = time.monotonic()
        return group

    async def _begin(self, begin: BroadcastBegin) -> list[Message]:
        """Send once all engines of the group are ready: one that is not would have the others stand still.
        Raises `BusError` where they are not in time, before any of them has received anything."""
        group = self._groups.get(begin.group)
        if group is None or group.copy is None or group.copy.policy_version != begin.policy_version:
            raise BusError(f"version {begin.policy_version} is not offered to group {begin.group}")
        all_ready = group.all_ready
        group.hear(begin.first_rank)
        group.ready.add(begin.first_rank)
        if group.ready >= group.ranks.keys():
            group.due, group.copy = group.copy, None
            group.ended.clear()
            group.begun.set()
            all_ready.set()
        elif not await set_within(all_ready, READY_S):
            group.living.cancel()
            raise BusError(
                f"{len(group.ready)} of {len(group.ranks)} engines are ready for version "
                f"{begin.policy_version} after {READY_S:g} s: group {group.name} is given up"
            )
        return [Done()]

    async def _end(self, end: BroadcastEnd) -> list[Message]:
        """Raises `BusError` when the group was given up before it was sent."""
        if group := self._groups.get(end.group):
            await group.ended.wait()  # at the latest when the group is given up
        if group is None or group.sent != end.policy_version:
            raise BusError(f"group {end.group} was given up before version {end.policy_version} was sent")
        return [Done()]

    def _on_left(self, left: GroupLeft) -> None:
        if group := self._groups.get(left.group):
            group.living.cancel()

    def _on_beat(self, beat: GroupBeat) -> None:
        if group := self._groups.get(beat.group):
            group.hear(beat.first_rank)

    async def _announced_since(self, version: int) -> Weights:
        """Return what is announced. Raises `BusError` where it is older than that."""
        weights = await asyncio.to_thread(self._announced)  # lent weights may be copied then
        if weights is None or weights.policy_version < version:
            raise BusError(f"version {version} is not announced by this learner")
        return weights

    async def _newest_copy(self, at_least: int) -> "SharedCopy":
        async with self._copying:
            for _ in range(COPIES):
                weights = await self._announced_since(at_least)
                if self._newest and self._newest.policy_version == weights.policy_version:
                    return self._newest
                self._newest = None  # before there are two more
                try:
                    copy = await asyncio.to_thread(self._copied, weights)
                except BusError:  # another rank has later ones already
                    if self._announced() is weights:
                        raise
                    continue
                if self._announced() is weights:  # else the tensors may have changed
                    self._newest = copy
                    return copy
                del copy  # the memory serves the next
        raise BusError(f"{COPIES} versions were announced while they were copied, the last at {at_least}")

    def _copied(self, weights: Weights) -> SharedCopy:
        """Return a copy, in memory that is there already if there is any: new memory takes seconds to
        lock."""
        memory = self._spares.pop() if self._spares else None
        with ThreadPoolExecutor(self._threads, "copy") as threads:
            copy = SharedCopy(weights, memory, threads, hashed=self._hashed)
        weakref.finalize(copy, self._unused, copy.memory).atexit = False
        return copy

    def _unused(self, memory: Memory) -> None:
        """Nobody holds the copy in it any more, so no process reads it."""
        if self._groups:
            self._spares = [*self._spares, memory][-SPARES:]

    async def _make_ready(self, group: "_Group", copy: SharedCopy) -> None:
        try:
            await group.process.prepares(copy)
        except BusError:  # what the process says next would be taken for another answer
            if group.name in self._groups:
                group.living.cancel()
            raise

    async def _new_group(self, wanted: Sequence[BroadcastWanted], copy: SharedCopy) -> "_Group":
        on_gpu = wanted[0].device == "cuda" and torch.cuda.is_available()
        firsts = list(accumulate((one.ranks for one in wanted), initial=1))
        name = f"sluice-{self._incarnation}-{secrets.token_hex(6)}"  # a name is never used twice
        order = {
            "group": name,
            "world_size": firsts[-1],
            "backend": "nccl" if on_gpu else "gloo",
            "device": f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if on_gpu else "cpu",
            "device_bytes": self._device_bytes,
            "timeout_s": self._timeout_s,
            "connect_s": CONNECT_S,
        }
        process = await _SenderProcess.start(order)
        try:
            port = int((await process.says("port", START_S))["port"])
            await process.prepares(copy)  # before anybody waits for the copy
        except BaseException:
            await process.end()
            self._forget_what_no_group_needs()
            raise
        if self._closed:
            await process.end()
            raise BusError("the learner ends, so it sends no more weights: wait for its successor")
        backend: Literal["gloo", "nccl"] = "nccl" if on_gpu else "gloo"
        group = _Group(name, own_address(self._bus, ""), port, backend, firsts[-1], process)
        group.ranks = {first: one.nonce for first, one in zip(firsts, wanted, strict=False)}
        group.actors = {first: one.actor for first, one in zip(firsts, wanted, strict=False)}
        self._groups[name] = group
        group.living = asyncio.create_task(self._live(group), name=f"broadcasts of {name}")
        self._living.add(group.living)
        group.living.add_done_callback(self._living.discard)
        await asyncio.sleep(0)  # a task cancelled before it begins ends no process
        return group

    async def _live(self, group: "_Group") -> None:
        """Send when an engine asks, until something goes wrong or none asks any more."""
        process = group.process
        try:
            await self._while_heard(group, process.says("joined", self._timeout_s))
            group.joined = True
            while await process.lives_until(group.begun, IDLE_S):
                group.begun.clear()
                due, group.due = group.due, None
                assert due is not None, "set before"
                sending = process.says("sent", self._timeout_s, request={"send": due.where()})
                await self._while_heard(group, sending)
                group.sent = due.policy_version
                group.ended.set()
                log.debug("weights_broadcast", group=group.name, policy_version=due.policy_version)
                del due  # the memory serves another
        except BusError as error:  # the engine hears of it by its own side of the group
            log.warning("group_given_up", group=group.name, reason=str(error))
        finally:
            del self._groups[group.name]
            group.ended.set()
            try:
                await group.until_connected()
            finally:
                await process.end()
            self._forget_what_no_group_needs()

    async def _while_heard(self, group: "_Group", work: Coroutine[Any, Any, Line]) -> None:
        """Do what all engines of a group take part in. Raises `BusError` as soon as one of them is gone: its
        ranks would keep those of the others waiting until the time limit of the group."""
        working = asyncio.create_task(work, name=f"work of {group.name}")
        group.hear(*group.ranks)
        try:
            while not working.done():
                began = time.monotonic()
                await asyncio.wait({working}, timeout=GROUP_BEAT_S)
                stood_still = time.monotonic() - began > 2 * GROUP_BEAT_S
                if stood_still or not self._bus.client.is_connected:  # nobody could be heard
                    group.hear(*group.ranks)
                elif silent := group.silent():
                    raise BusError(f"{silent} is not heard for {SILENT_S:g} s")
            await working
        finally:
            await cancelled(working)

    def _forget_what_no_group_needs(self) -> None:
        if not self._groups:
            self._newest = None
            self._spares.clear()


@dataclass(eq=False)
class _Asking:
    """Engines that are to be sent to together."""

    wanted: list[BroadcastWanted] = field(default_factory=list)
    all_here: asyncio.Event = field(default_factory=asyncio.Event)
    answer: "asyncio.Task[_Group] | None" = None


@dataclass(eq=False)
class _Group:
    name: str
    host: str
    port: int
    backend: Literal["gloo", "nccl"]
    world_size: int
    process: "_SenderProcess"
    ranks: dict[int, str] = field(default_factory=dict)
    """First rank of each engine, and the nonce of what it asked last."""
    actors: dict[int, str] = field(default_factory=dict)
    """Actor of each engine, by the same."""
    heard_s: dict[int, float] = field(default_factory=dict)
    """When each engine was heard last, by the monotonic clock."""
    copy: SharedCopy | None = None
    """Offered, and not asked for yet."""
    ready: set[int] = field(default_factory=set)
    """First ranks of the engines that wait for what is offered."""
    all_ready: asyncio.Event = field(default_factory=asyncio.Event)
    due: SharedCopy | None = None
    """Being sent."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when what was begun last is sent, or never will be."""
    sent: int = -1
    """Version that was sent last."""
    offered_s: float = -math.inf
    """When the last offer was made, by the monotonic clock."""
    joined: bool = False
    """Whether all engines are in it."""
    living: "asyncio.Task[None]" = field(init=False)

    def hear(self, *first_ranks: int) -> None:
        """Note that the actors of these engines live."""
        now = time.monotonic()
        self.heard_s |= {rank: now for rank in first_ranks if rank in self.actors}

    async def until_connected(self) -> None:
        """Wait until engines that were offered something have connected, so that they hear of the end."""
        if not self.joined and self.process.lives:
            await asyncio.sleep(self.offered_s + CONNECT_S - time.monotonic())

    def silent(self) -> str:
        """Return which engine's actor is not heard any more, in words; empty for none."""
        oldest = time.monotonic() - SILENT_S
        for rank, actor in self.actors.items():
            if self.heard_s[rank] < oldest:
                return f"the engine of {actor or 'an actor'} with ranks from {rank} on"
        return ""

    def is_of(self, wanted: Sequence[BroadcastWanted]) -> bool:
        """Return whether the askers are the engines of this group, and note what they asked."""
        asked = {one.first_rank: one.nonce for one in wanted if one.group == self.name}
        if len(asked) < len(wanted) or asked.keys() != self.ranks.keys():
            return False
        self.ranks = asked
        return True

    def offer(self, wanted: BroadcastWanted) -> tuple[OfferedBucket, ...]:
        """Return what an engine of the group is offered. Raises `BusError` where the group is given up
        meanwhile."""
        if self.copy is None:
            raise BusError(f"group {self.name} was given up before it was offered")
        [rank] = [rank for rank, nonce in self.ranks.items() if nonce == wanted.nonce]
        return tuple(self._offered(rank, some, self.copy) for some in self.copy.taken_together())

    def _offered(self, rank: int, buckets: Sequence[WeightBucket], copy: SharedCopy) -> OfferedBucket:
        return OfferedBucket(
            group=self.name,
            host=self.host,
            port=self.port,
            backend=self.backend,
            first_rank=rank,
            world_size=self.world_size,
            policy_version=copy.policy_version,
            names=tuple(name for bucket in buckets for name in bucket.names),
            dtypes=tuple(dtype for bucket in buckets for dtype in bucket.dtypes),
            shapes=tuple(shape for bucket in buckets for shape in bucket.shapes),
            digests=tuple(digest for bucket in buckets for digest in bucket.digests),
        )


class _SenderProcess:
    """Rank 0 of a group; ends with this process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._talking = asyncio.Lock()
        """Held from the request until the process has answered."""

    @classmethod
    async def start(cls, order: Line) -> "_SenderProcess":
        return cls(
            await asyncio.create_subprocess_exec(
                *module_command("learner.publication.broadcast_process", json.dumps(order)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**AS_SGLANG, **os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is the learner's to handle
            )
        )

    @property
    def lives(self) -> bool:
        return self._process.returncode is None

    async def _tell(self, line: Line) -> None:
        assert self._process.stdin is not None, "stdin is a pipe"
        self._process.stdin.write(json.dumps(line).encode() + b"\n")
        with suppress(ConnectionError):  # the process's end is heard next
            await self._process.stdin.drain()

    async def says(self, what: str, timeout_s: float, *, request: Line | None = None) -> Line:
        """Return the sender's next line, which must have the key `what`. Raises `BusError` when it has not,
        or is late."""
        assert self._process.stdout is not None, "stdout is a pipe"
        try:
            async with self._talking, asyncio.timeout(timeout_s):
                if request is not None:
                    await self._tell(request)
                data = await self._process.stdout.readline()
        except TimeoutError:
            raise BusError(f"waited {timeout_s:g} s for {what!r} of the process that broadcasts") from None
        line: Line = json.loads(data) if data else {"error": "it was killed"}
        if what not in line:
            raise BusError(f"the process that broadcasts ended before {what!r}: {line.get('error', line)}")
        return line

    async def prepares(self, copy: SharedCopy) -> None:
        said = await self.says("prepared", START_S, request={"prepare": copy.where()})
        if slower := said["slower"]:
            log.warning("weights_are_sent_slowly", reason=slower)

    async def lives_until(self, event: asyncio.Event, timeout_s: float) -> bool:
        """Wait for `event`; False when it takes longer. Raises `BusError` when the process ends before."""
        ended, setting = asyncio.create_task(self._process.wait()), asyncio.create_task(event.wait())
        try:
            await asyncio.wait({ended, setting}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            setting.cancel()
        if self._process.returncode is not None:
            raise BusError(f"the process that broadcasts ended with status {self._process.returncode}")
        return event.is_set()

    async def end(self) -> None:
        if self.lives:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)  # `kill` could take its status from asyncio
        async with self._talking:  # whoever waits for an answer learns that none comes
            await self._process.communicate()  # waits for the process's end, and closes the pipes
