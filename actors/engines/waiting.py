"""Waiting for engines, which may never answer, with a limit or until an event."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from bus.errors import EngineError

T = TypeVar("T")
AT_LEAST_S = 0.01
"""0 would be no limit."""
CANCEL_S = 5.0
"""Seconds after which a cancelled call of an engine that hangs is left behind."""


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


async def unless(event: asyncio.Event, doing: Awaitable[T]) -> T | None:
    """Return the result of `doing`, or None if `event` is set first; `doing` is then cancelled."""
    task = asyncio.ensure_future(doing)
    task.add_done_callback(hear)
    try:
        await first(task, event, None)
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


def hear(task: "asyncio.Future[T]") -> None:
    """Retrieve a task's exception, which is otherwise lost if the waiting caller was cancelled."""
    if not task.cancelled():
        task.exception()
