"""Waits that end, whatever the other side does."""

import asyncio

import pytest

from bus.waiting import cancelled, ended_before, ended_soon_after, unless


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


async def test_what_is_said_last_has_its_time_after_the_stop_and_no_more():
    stop, said = asyncio.Event(), []

    async def say(pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        said.append(pause_s)

    await ended_soon_after(stop, say(0.01), timeout_s=0.0)  # before the stop it has all the time
    stop.set()
    await ended_soon_after(stop, say(0.02), timeout_s=5.0)
    await ended_soon_after(stop, say(60.0), timeout_s=0.01)
    assert said == [0.01, 0.02]


async def test_what_is_said_last_may_fail_and_is_heard():
    async def fail() -> None:
        raise ValueError("storage refuses")

    stop = asyncio.Event()
    for _ in range(2):
        with pytest.raises(ValueError, match="storage refuses"):
            await ended_soon_after(stop, fail(), timeout_s=5.0)
        stop.set()


async def test_who_is_cancelled_while_it_waits_for_a_task_or_a_stop_leaves_nothing_behind():
    stop, doing = asyncio.Event(), asyncio.create_task(asyncio.Event().wait())
    before = asyncio.all_tasks()
    waiting = asyncio.create_task(ended_before(stop, doing))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
    await cancelled(doing)


async def test_what_is_not_done_at_an_event_may_have_its_time_after_it():
    event, done = asyncio.Event(), asyncio.Event()
    event.set()

    async def result() -> str:
        await done.wait()
        return "whole"

    assert await unless(event, result()) is None
    assert await unless(event, result(), after_s=0.01) is None
    asyncio.get_running_loop().call_later(0.01, done.set)
    assert await unless(event, result(), after_s=30.0) == "whole"
