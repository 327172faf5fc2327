"""Waiting for an event or a task, with a limit or until `stop`."""

import asyncio
from typing import Any, TypeVar

T = TypeVar("T")
CANCEL_AGAIN_S = 1.0


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
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if task.done():
        task.result()
    return task.done()


async def cancelled(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel the tasks, and return when all have ended.

    Once is not enough: Python 3.11's `asyncio.wait_for`, by which nats-py waits for answers, forgets that it
    was cancelled when an answer came at the same moment."""
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=CANCEL_AGAIN_S)
