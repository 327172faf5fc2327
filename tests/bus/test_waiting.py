"""Waits that end, whatever the other side does."""

import asyncio

from bus.waiting import cancelled


async def test_a_task_that_forgets_that_it_was_cancelled_is_cancelled_again():
    begun = asyncio.Event()

    async def forgets() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()

    deaf, over = asyncio.create_task(forgets()), asyncio.create_task(asyncio.sleep(0))
    await begun.wait()
    await over
    async with asyncio.timeout(30):
        await cancelled(deaf, over)
    assert deaf.cancelled()
    assert not over.cancelled()
