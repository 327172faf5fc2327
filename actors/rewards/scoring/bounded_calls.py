"""Calls a user's function so that it cannot block the event loop, hang a rollout or raise through it."""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from math import ceil
from typing import Generic, TypeVar, cast

from actors.rewards.scoring.call_times import CallTimes
from bus.process.plugins import RAISED
from bus.waiting import is_cancelled, set_within

Argument = TypeVar("Argument")
Outcome = object
"""Return value of the function, or the exception that it raised."""


class CallHangsError(TimeoutError):
    """A call took longer than its time limit; a `TimeoutError` of the function's own says nothing of that."""


class BoundedCalls(Generic[Argument]):
    """Calls one function of one argument, within a time.

    Async functions run on the event loop, plain ones in daemon threads, `threads` at a time, each of which
    takes its share of the calls that wait, or `inline` where they are known to be quick. The timeout applies
    to a single call. A thread that is stuck in a call is left behind, and a new thread takes the calls after
    it."""

    def __init__(
        self, name: str, function: Callable[[Argument], object], *,
        timeout_s: float | None, threads: int = 16, inline: bool = False,
    ) -> None:  # fmt: skip
        self._name = name
        self._function = function
        self._timeout_s = timeout_s
        self._async = _is_async(function)
        self._inline = inline and not self._async
        self._pending: list[tuple[Argument, asyncio.Future[Outcome]]] = []
        self._threads = threads
        self._drains: set[asyncio.Task[None]] = set()
        self.times = CallTimes()
        """How long calls take, their wait for a thread included; without those that run inline."""

    async def call(self, argument: Argument) -> Outcome:
        """Return what the function does, an exception as a value; `CallHangsError` for a call that hangs."""
        if self._inline:
            return _call(self._function, argument)
        with self.times.timed():
            return await (self._await(argument) if self._async else self._in_thread(argument))

    async def _await(self, argument: Argument) -> Outcome:
        function = cast(Callable[[Argument], Awaitable[object]], self._function)
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await function(argument)
        # A user's function may raise anything; the caller raises it again as its own error with this cause.
        except (*RAISED, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            return CallHangsError() if limit.expired() else _as_outcome(error)

    async def _in_thread(self, argument: Argument) -> Outcome:
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._pending.append((argument, future))
        if len(self._drains) < self._threads:
            drain = asyncio.create_task(self._drain_pending(), name=f"reward {self._name}")
            self._drains.add(drain)
            drain.add_done_callback(self._drains.discard)
        return await future

    async def _drain_pending(self) -> None:
        while self._pending:
            share = ceil(len(self._pending) / self._threads)
            batch, self._pending = self._pending[:share], self._pending[share:]
            arguments = [argument for argument, _ in batch]
            outcomes = await _run_in_thread(self._function, arguments, self._timeout_s)
            for (_, future), outcome in zip(batch, outcomes, strict=False):
                if not future.done():
                    future.set_result(outcome)
            self._pending = batch[len(outcomes) :] + self._pending  # the calls after the one that hung


async def _run_in_thread(
    function: Callable[[Argument], object], arguments: Sequence[Argument], timeout_s: float | None
) -> list[Outcome]:
    """Call the function with each argument in order in a new daemon thread. Returns the outcomes. If a call
    takes longer than `timeout_s`, the list ends there with CallHangsError."""
    loop, ended, outcomes = asyncio.get_running_loop(), asyncio.Event(), list[Outcome]()
    abandoned = threading.Event()

    def work() -> None:
        for argument in arguments:
            outcomes.append(_call(function, argument))
            if abandoned.is_set():
                return
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=work, name="reward", daemon=True).start()
    if timeout_s is None:
        await ended.wait()
        return outcomes
    while True:
        before = len(outcomes)
        if await set_within(ended, timeout_s):
            return outcomes
        if len(outcomes) == before:  # still the same call as one timeout ago
            abandoned.set()
            return [*outcomes[:before], CallHangsError()]


def _call(function: Callable[[Argument], object], argument: Argument) -> Outcome:
    try:
        return function(argument)
    # A user's function may raise anything; the caller raises it again as its own error with this cause.
    except RAISED as error:
        return _as_outcome(error)


def _as_outcome(error: BaseException) -> Exception:
    """Return what a call raised, as an exception that may go through tasks: an exit would end the loop."""
    return error if isinstance(error, Exception) else RuntimeError(repr(error))


def _is_async(function: object) -> bool:
    called = getattr(function, "__call__", None)  # noqa: B004  # an object may be called asynchronously
    return any(inspect.iscoroutinefunction(f) for f in (function, called, getattr(function, "func", None)))
