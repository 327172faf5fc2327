"""Answers a request that comes again as the first time: it joins the one under way, or gets its answer."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from hashlib import blake2b

from actors.gateway.dialects.exchange import Reply
from actors.gateway.dialects.refusal import RefusedError
from bus.waiting import cancelled, retrieve_exception

REMEMBERED = 64
"""Exchanges of a session that are kept for retries."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """What tells whether a request was sent before."""

    digest: bytes
    key: str | None = None
    number: int | None = None
    """How many attempts there were before, by its `x-stainless-retry-count`; None if it does not count."""

    @classmethod
    def of(cls, path: str, raw: bytes, key: str | None, counted: str | None) -> "Attempt":
        """Read the headers; a count that is none says nothing."""
        number = int(counted) if counted and counted.isdecimal() and len(counted) < 4 else None
        return cls(blake2b(raw, digest_size=16, person=path[-16:].encode()).digest(), key or None, number)

    @property
    def may_come_again(self) -> bool:
        """Return whether a later request could be known as the same."""
        return self.key is not None or self.number is not None


@dataclass(eq=False, slots=True)
class _Exchange:
    attempt: Attempt
    task: asyncio.Task[Reply]
    answers: int
    waiting: int = 0


class Exchanges:
    """The requests of one session that are under way or answered."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._known: list[_Exchange] = []
        """The oldest first."""

    @property
    def under_way(self) -> int:
        """Return the number of answers that are still to come."""
        return sum(exchange.answers for exchange in self._known if not exchange.task.done())

    def earlier(self, attempt: Attempt) -> _Exchange | None:
        """Return the exchange that the attempt repeats. Raises `RefusedError` for another request's key."""
        if attempt.key is not None:
            return self._of_key(attempt)
        if not attempt.number:
            return None
        same = [e for e in self._known if e.attempt.digest == attempt.digest and e.attempt.key is None]
        left = [exchange for exchange in same if not (exchange.task.done() or exchange.waiting)]
        newest = (left or same)[-1:]
        return newest[0] if newest else None

    def begin(self, attempt: Attempt, work: Coroutine[object, object, Reply], answers: int) -> _Exchange:
        """Start the work of a request that was not sent before, and wants so many answers."""
        exchange = _Exchange(attempt, asyncio.create_task(work, name="gateway turn"), answers)
        exchange.task.add_done_callback(retrieve_exception)
        exchange.task.add_done_callback(lambda _: self._ended(exchange))
        self._known.append(exchange)
        return exchange

    async def answer(self, exchange: _Exchange) -> Reply:
        """Wait for the answer. Whoever waits last and leaves ends the work, at once or after the grace."""
        exchange.waiting += 1
        try:
            await asyncio.wait([exchange.task])
        finally:
            exchange.waiting -= 1
            if not exchange.task.done():
                self._left(exchange)
        if exchange.task.cancelled():
            raise RefusedError(
                403, "session_closed", "this session was closed while the policy was answering"
            )
        return exchange.task.result()

    async def close(self) -> None:
        await cancelled(*(exchange.task for exchange in self._known))
        self._known.clear()

    def _of_key(self, attempt: Attempt) -> _Exchange | None:
        for exchange in reversed(self._known):
            if exchange.attempt.key == attempt.key:
                if exchange.attempt.digest != attempt.digest:
                    reason = (
                        f"Idempotency-Key {attempt.key!r} belongs to an earlier request: send another key"
                    )
                    raise RefusedError(409, "idempotency_key_in_use", reason)
                return exchange
        return None

    def _left(self, exchange: _Exchange) -> None:
        if not exchange.attempt.may_come_again:
            self._abandon(exchange)
        elif not exchange.waiting:
            asyncio.get_running_loop().call_later(self._grace_s, self._abandon, exchange)

    @staticmethod
    def _abandon(exchange: _Exchange) -> None:
        if not exchange.waiting:
            exchange.task.cancel()

    def _ended(self, exchange: _Exchange) -> None:
        """Keep the newest answers; what failed is done anew when it is asked for again."""
        if exchange.task.cancelled() or exchange.task.exception() is not None:
            self._known = [known for known in self._known if known is not exchange]
        done = [known for known in self._known if known.task.done()]
        for oldest in done[:-REMEMBERED]:
            self._known.remove(oldest)
