"""Waiting for one thing, or for what ends the wait."""

import asyncio
from typing import TypeVar

T = TypeVar("T")


async def set_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for `event`; False when that takes longer."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def ended_before(stop: asyncio.Event, task: asyncio.Task[T]) -> bool:
    """Wait for `task`, and raise what it raised; False if `stop` came first, and then it goes on."""
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if task.done():
        task.result()
    return task.done()
