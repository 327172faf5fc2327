"""Waiting for an event, a task or an answer, with a limit or until an event is set."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypeVar

import nats.errors
import structlog
from nats.js.errors import ServiceUnavailableError

from bus.errors import BusAwayError, BusError, EngineError

T = TypeVar("T")
log = structlog.get_logger()


class GarbledAnswerError(nats.errors.Error):  # type: ignore[misc]  # nats-py has no types
    """An answer has bytes that neither the bus nor a process of ours sends: ask again. It is one of nats-py's
    errors, so that whoever waits for a bus that is away waits for this to pass too."""


AWAY = (
    nats.errors.TimeoutError,
    nats.errors.NoRespondersError,
    nats.errors.ConnectionClosedError,
    nats.errors.ConnectionReconnectingError,
    nats.errors.StaleConnectionError,
    nats.errors.OutboundBufferLimitError,
    ServiceUnavailableError,
    GarbledAnswerError,
)
"""Causes of a `BusError` that pass when the bus is back."""
RETRY_S = 0.25
GARBLED_ATTEMPTS = 20
"""Answers after which one that is garbled each time is taken to be so where it is stored."""
STOPPING_S = 10.0
"""Longest outage that a process waits out once it was told to stop."""
REMIND_S = 60.0
"""Seconds between two lines of the log that say what is waited for."""
SLOW_S = 3.0
"""Seconds after which a command says what it waits for."""
CANCEL_AGAIN_S = 1.0
AT_LEAST_S = 0.01
"""The shortest limit of a step, since 0 would mean that there is none."""
CANCEL_S = 5.0
"""Seconds after which a cancelled call of an engine that hangs is left behind."""


def is_cancelled() -> bool:
    """Return whether somebody cancels this task; if nobody does, a `CancelledError` comes from the code that
    the task runs."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def until_answered(
    ask: Callable[[], Awaitable[T]],
    what: str,
    *,
    patience_s: float,
    is_there: Callable[[], bool],
    stop: asyncio.Event | None = None,
) -> T:
    """Return what `ask` does, which is called when the bus is there, and again when it was away meanwhile.

    Raises `BusAwayError` after `patience_s`, or after `STOPPING_S` if `stop` is set; and the `BusError` of
    `ask` at once where the bus answers that it refuses, or after `GARBLED_ATTEMPTS` garbled answers."""
    began, told_s, reason, garbled = time.monotonic(), 0.0, "not connected", 0
    while True:
        if is_there():
            try:
                return await ask()
            except BusError as error:
                garbled += isinstance(error.__cause__, GarbledAnswerError)
                if not is_away(error) or garbled >= GARBLED_ATTEMPTS:
                    raise
                reason = str(error)
        waited_s = time.monotonic() - began
        if waited_s > longest_outage_s(patience_s, stop):
            raise BusAwayError(f"{what}: the bus was away for {waited_s:.0f} s ({reason})")
        if waited_s >= told_s:
            log.warning("waiting_for_the_bus", what=what, reason=reason, waited_s=round(waited_s))
            told_s = waited_s + REMIND_S
        await asyncio.sleep(RETRY_S)


def longest_outage_s(patience_s: float, stop: asyncio.Event | None) -> float:
    """Return the seconds for which a process waits for a bus that is away: few once `stop` is set."""
    return min(STOPPING_S, patience_s) if stop is not None and stop.is_set() else patience_s


def is_away(error: BusError) -> bool:
    """Return whether an error passes when the bus is back."""
    return isinstance(error, BusAwayError) or isinstance(error.__cause__, AWAY)


@contextmanager
def told_if_slow(event: str, **values: object) -> Iterator[None]:
    """Log `event` as a warning where what is inside takes longer than `SLOW_S`: who waits knows for what."""
    telling = asyncio.get_running_loop().call_later(SLOW_S, partial(log.warning, event, **values))
    try:
        yield
    finally:
        telling.cancel()


async def set_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for `event` for at most the given time; return whether it was set."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def ended_before(stop: asyncio.Event, task: asyncio.Task[T]) -> bool:
    """Wait for `task`, and raise what it raised. Return False if `stop` came first; the task then goes on."""
    await first(task, stop, None)
    if task.done():
        task.result()
    return task.done()


async def ended_soon_after(stop: asyncio.Event, doing: Coroutine[None, None, None], timeout_s: float) -> None:
    """Wait for `doing`, and raise what it raised; once `stop` is set, for at most the given time."""
    task = asyncio.create_task(doing)
    if not await ended_before(stop, task):
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.cancel():
            task.result()


async def cancelled(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel the tasks, and return when all have ended.

    Once is not enough: Python 3.11's `asyncio.wait_for`, by which nats-py waits for answers, forgets that it
    was cancelled when an answer came at the same moment."""
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=CANCEL_AGAIN_S)


@asynccontextmanager
async def bounded(timeout_s: float, what: str) -> AsyncIterator[None]:
    """Limit a wait like `asyncio.timeout`, but raise EngineError that says what took so long."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise EngineError(f"{what} within {timeout_s:g} s") from None


def left_s(end_s: float) -> float:
    """Return the seconds until `end_s` on the monotonic clock, as the limit of the next step."""
    return max(end_s - time.monotonic(), AT_LEAST_S)


async def unless(event: asyncio.Event, doing: Awaitable[T], *, after_s: float = 0.0) -> T | None:
    """Return the result of `doing`, or None if it has not ended `after_s` after `event` was set; it is then
    cancelled."""
    task = asyncio.ensure_future(doing)
    task.add_done_callback(retrieve_exception)
    try:
        await first(task, event, None)
        if not task.done() and after_s:
            await asyncio.wait([task], timeout=after_s)
        return task.result() if task.done() else None
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=CANCEL_S)


async def first(task: "asyncio.Future[T]", event: asyncio.Event, timeout_s: float | None) -> None:
    """Return when the task is done, the event is set, or the time is over."""
    setting = asyncio.create_task(event.wait())
    either: set[asyncio.Future[Any]] = {task, setting}
    try:
        await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        setting.cancel()


def retrieve_exception(task: "asyncio.Future[T]") -> None:
    """Retrieve a task's exception, which is otherwise lost if the waiting caller was cancelled."""
    if not task.cancelled():
        task.exception()
