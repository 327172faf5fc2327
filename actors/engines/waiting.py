"""Waiting for engines, which may never answer: always for one of two things, or for so long."""

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
"""What an engine that hangs was asked to do is left behind after this."""


@asynccontextmanager
async def bounded(timeout_s: float, what: str) -> AsyncIterator[None]:
    """As `asyncio.timeout`, but raises EngineError that says what took so long."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise EngineError(f"{what} within {timeout_s:g} s") from None


def left_s(end_s: float) -> float:
    """Seconds until `end_s` of the monotonic clock, as a limit of what is done next."""
    return max(end_s - time.monotonic(), AT_LEAST_S)


async def unless(event: asyncio.Event, doing: Awaitable[T]) -> T | None:
    """The result of `doing`, or None when `event` is set before: then it is cancelled."""
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
    """Return when the task is done, the event set, or the time over."""
    setting = asyncio.create_task(event.wait())
    either: set[asyncio.Future[Any]] = {task, setting}
    try:
        await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        setting.cancel()


def hear(task: "asyncio.Future[T]") -> None:
    """Take note of a task's failure: nobody else does if they were cancelled while they waited for it."""
    if not task.cancelled():
        task.exception()
