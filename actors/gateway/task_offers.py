"""Rollouts that wait for a client, and clients that wait for a rollout."""

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil

from actors.episodes.task import Task
from actors.gateway.dialects.refusal import RefusedError
from actors.gateway.session import Session
from bus.waiting import set_within

CLAIMS_REMEMBERED = 4096
"""Answers to requests for tasks that are kept for retries, of each taker."""
GROUPS_REMEMBERED = 4096
"""Groups without a rollout under way: a rollout that failed may be offered again."""
OTHERS_PER_HELDOUT = 4
"""Rollouts of training that are claimed for each held-out one, while both are offered."""


@dataclass(frozen=True, slots=True)
class OwnTask:
    """A task that a client brings itself, which takes the place of a group's prompt."""

    name: str
    """What tells the task from others: clients that bring the same name share a group."""
    task: Task


@dataclass(eq=False)
class Taker:
    """A program that takes tasks, or all clients that nobody started."""

    url: str | None = None
    """Where the taker reaches the gateway, if that is elsewhere than others do."""
    sessions: set[Session] = field(default_factory=set)
    taken: int = 0
    last_request_s: float = field(default_factory=time.monotonic)
    """When the taker asked for a task in a request that was not refused, or was done with one, by the
    monotonic clock."""
    claims: OrderedDict[str, bytes] = field(default_factory=OrderedDict)
    """Answers to its requests for tasks, by `Idempotency-Key`."""
    gone: str | None = None

    @contextmanager
    def leading(self, session: Session) -> Iterator[None]:
        """Count a session as under way while inside; one of a program that is gone has failed."""
        self.sessions.add(session)
        self.taken += 1
        if self.gone is not None:
            session.end_episode(self.gone)
        try:
            yield
        finally:
            self.sessions.discard(session)
            self.last_request_s = time.monotonic()

    def remember(self, key: str, answer: bytes) -> None:
        """Keep an answer for retries of its request; the oldest go first."""
        self.claims[key] = answer
        if len(self.claims) > CLAIMS_REMEMBERED:
            self.claims.popitem(last=False)

    def leave(self, reason: str) -> None:
        """Fail the sessions under way."""
        self.gone = reason
        for session in self.sessions:
            if not session.ended.is_set():
                session.end_episode(reason)


@dataclass(eq=False)
class OfferedGroup:
    """The rollouts of one lease."""

    runs: int = 0
    """Rollouts that are offered or under way."""
    claimed: int = 0
    own: str | None = None
    """Name of the task of a client's own that it is rolled out for."""


@dataclass(eq=False)
class TaskOffer:
    """One rollout that a client may claim."""

    task: Task
    group: OfferedGroup
    own: OwnTask | None = None
    taker: Taker | None = None
    refused: str | None = None
    claimed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the rollout was claimed, or refused."""
    session: "asyncio.Future[tuple[Task, Session]]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """What the client gets once the rollout has begun."""


@dataclass(eq=False)
class _Waiter:
    own: OwnTask | None
    taker: Taker
    found: "asyncio.Future[TaskOffer]"


class TaskOffers:
    """Brings clients and rollouts together, the oldest of both first. A client that takes any task gets the
    next sibling of a group that was begun, before a new group. One with a task of its own gets a rollout of
    that task's group, or makes a group that nobody has begun its own."""

    def __init__(self) -> None:
        self._groups: OrderedDict[str, OfferedGroup] = OrderedDict()
        self._offers: deque[TaskOffer] = deque()
        self._waiters: deque[_Waiter] = deque()
        self._since_heldout = 0
        """Rollouts of training that were claimed since the last held-out one."""
        self._changed = asyncio.Event()

    @property
    def offered(self) -> int:
        return len(self._offers)

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    def leases_wanted(self, samples: int) -> int:
        """Return how many groups of so many rollouts those who wait would begin."""
        names = Counter(None if waiter.own is None else waiter.own.name for waiter in self._waiters)
        return sum(ceil(count / samples) for count in names.values())

    async def wanted_within(self, timeout_s: float) -> None:
        """Return when a client comes or goes, or after the given time."""
        self._changed.clear()
        await set_within(self._changed, timeout_s)

    @contextmanager
    def offering(self, task: Task) -> Iterator[TaskOffer]:
        """Offer a rollout while inside, unless it was claimed; its group lasts as long."""
        name = task.task_id.rpartition(".")[0]
        group = self._groups.setdefault(name, OfferedGroup())
        group.runs += 1
        offer = TaskOffer(task, group)
        self._offers.append(offer)
        self._match()
        try:
            yield offer
        finally:
            if offer in self._offers:
                self._offers.remove(offer)
            if not offer.session.done():
                offer.session.set_exception(RefusedError(503, "no_task", "the task is gone", retry=True))
                offer.session.exception()  # nobody need wait for the exception
            group.runs -= 1
            if not (group.runs or group.claimed):
                self._groups.pop(name, None)
            while len(self._groups) > GROUPS_REMEMBERED and not next(iter(self._groups.values())).runs:
                self._groups.popitem(last=False)

    def refuse(self, reason: str) -> None:
        """Tell all rollouts that wait that nobody will claim them."""
        for offer in self._offers:
            offer.refused = reason
            offer.claimed.set()
        self._offers.clear()

    async def claim(self, own: OwnTask | None, taker: Taker, timeout_s: float) -> TaskOffer | None:
        """Return a rollout, for which the client answers from now on; None if there is none in time."""
        waiter = _Waiter(own, taker, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._match()
        self._changed.set()
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter.found
        except TimeoutError:
            return waiter.found.result() if _is_answered(waiter) else None
        except asyncio.CancelledError:
            if _is_answered(waiter):
                self._offer_again(waiter.found.result())
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            self._changed.set()

    def _offer_again(self, offer: TaskOffer) -> None:
        """Take a rollout from a client that has left, unless its session has begun: that ends by itself."""
        if not offer.session.done():
            offer.own = offer.taker = None
            offer.group.claimed -= 1
            offer.claimed.clear()
            self._offers.appendleft(offer)
            self._match()

    def _match(self) -> None:
        for waiter in list(self._waiters):
            offer = None if waiter.found.done() else self._fitting(waiter.own)
            if offer is not None:
                self._waiters.remove(waiter)
                self._offers.remove(offer)
                offer.own, offer.taker = waiter.own, waiter.taker
                offer.group.claimed += 1
                self._since_heldout = 0 if offer.task.heldout else self._since_heldout + 1
                offer.group.own = waiter.own.name if waiter.own is not None else None
                offer.claimed.set()
                waiter.found.set_result(offer)

    def _fitting(self, own: OwnTask | None) -> TaskOffer | None:
        """Return the rollout that a client should get: of a group that was begun for the same, or of none.
        Held-out ones are every fifth while there are both, so that neither waits for all of the other."""
        name = own.name if own is not None else None
        heldout_is_due = self._since_heldout >= OTHERS_PER_HELDOUT
        due = [offer for offer in self._offers if offer.task.heldout == heldout_is_due]
        for offers in (due, self._offers):
            begun = (offer for offer in offers if offer.group.claimed and offer.group.own == name)
            unbegun = (offer for offer in offers if not offer.group.claimed)
            if (found := next(begun, next(unbegun, None))) is not None:
                return found
        return None


def _is_answered(waiter: _Waiter) -> bool:
    return waiter.found.done() and not waiter.found.cancelled()
