"""The next step's groups are asked for ahead, given up on `stop`, and leased anew if some cannot be read."""

import asyncio

import pytest

from bus.errors import NoActorsError, UnreadableGroupsError
from bus.requests import BatchLease
from learner.progress.progress import Progress
from learner.run.next_batch import NextBatch


class Reader:
    """Leases no groups to any step, and notes which it was asked for."""

    def __init__(self):
        self.asked = []

    async def lease(self, step, version, on_wait):
        self.asked.append((step, version))
        on_wait("groups")
        return BatchLease(step=step, groups=())


class World:
    """Ranks that fetch at once, and answer the question whether all have as told."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.fetches = []

    async def fetch(self, lease):
        outcome = self.fetches.pop() if self.fetches else None
        if outcome is not None:
            raise outcome

    async def call(self, method, step):
        await asyncio.sleep(0)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def next_batch(reader, world, *, steps=9):
    waits = []
    progress = Progress()
    progress.trains_from = 5
    return NextBatch(reader, world, progress, steps=steps, on_wait=waits.append), waits


async def test_the_step_after_is_asked_for_while_this_one_trains():
    reader, stop = Reader(), asyncio.Event()
    batch, waits = next_batch(reader, World(None, None, True), steps=2)
    assert (await batch.take(1, stop)).step == 1
    assert (await batch.take(2, stop)).step == 2
    await batch.drop()
    assert reader.asked == [(1, 5), (2, 6)]  # and none beyond the last
    assert waits == ["groups", "", "groups", ""]


async def test_a_stop_is_heard_while_another_rank_fetches():
    stop = asyncio.Event()
    batch, _ = next_batch(Reader(), World(None))
    taking = asyncio.create_task(batch.take(1, stop))
    await asyncio.sleep(0.01)
    assert not taking.done()
    stop.set()
    assert await asyncio.wait_for(taking, 60) is None


@pytest.mark.parametrize("ranks", ["this one", "another"])
async def test_groups_that_a_rank_cannot_read_are_replaced(ranks):
    reader, world = Reader(), World(True)
    if ranks == "this one":
        world.fetches = [UnreadableGroupsError("damaged")]
    else:
        world.answers = [False, True]
    batch, _ = next_batch(reader, world, steps=1)
    assert (await batch.take(1, asyncio.Event())).step == 1
    assert reader.asked == [(1, 5), (1, 5)]


async def test_actors_that_came_back_while_a_step_was_trained_are_asked_for_again():
    class Away(Reader):
        async def lease(self, step, version, on_wait):
            found = await super().lease(step, version, on_wait)
            if len(self.asked) in (2, 4, 5):
                raise NoActorsError("no actor was heard")
            return found

    reader, stop = Away(), asyncio.Event()
    batch, _ = next_batch(reader, World(True))
    for step in (1, 2):
        assert (await batch.take(step, stop)).step == step
        await asyncio.sleep(0)  # it is trained
    assert reader.asked == [(1, 5), (2, 6), (2, 6), (3, 7)]
    with pytest.raises(NoActorsError):
        await batch.take(3, stop)


async def test_what_is_still_asked_for_can_be_dropped():
    class Endless(Reader):
        async def lease(self, step, version, on_wait):
            while True:  # as nats-py does, it forgets a cancellation
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    if self.asked:
                        raise
                    self.asked.append(step)

    stop, reader = asyncio.Event(), Endless()
    batch, _ = next_batch(reader, World(True))
    taking = asyncio.create_task(batch.take(1, stop))
    await asyncio.sleep(0.01)
    stop.set()
    assert await taking is None
    await asyncio.wait_for(batch.drop(), 60)
