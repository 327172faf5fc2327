"""What gloo raises where a rank is lost is told as that; other errors stay what they are."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bus.errors import WorldError
from learner.run.service import train_thread
from learner.world import channel
from learner.world.channel import Channel, RankCall
from learner.world.rank import translated
from tests.learner.worlds import Worlds


async def two_ranks() -> list[dist.ProcessGroupGloo]:
    """Two ranks of one group, both in this process, which keeps the group of its other tests."""
    store, timeout = dist.HashStore(), timedelta(seconds=60)
    with ThreadPoolExecutor(2) as pool:
        loop = asyncio.get_running_loop()
        made = [loop.run_in_executor(pool, dist.ProcessGroupGloo, store, rank, 2, timeout) for rank in (0, 1)]
        return await asyncio.gather(*made)


@pytest.mark.parametrize("is_silent", [False, True], ids=["ended", "silent"])
async def test_collective_of_an_installed_gloo_that_has_lost_a_rank_is_told_as_that(
    monkeypatch: pytest.MonkeyPatch, is_silent: bool
):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    ranks, options = await two_ranks(), dist.AllreduceOptions()
    if is_silent:
        options.timeout = timedelta(milliseconds=50)
    else:
        del ranks[1]
    with pytest.raises(WorldError, match=r"rank 0 of the learner lost another: .*gloo"):
        await translated(asyncio.to_thread(lambda: ranks[0].allreduce([torch.ones(1)], options).wait()))


def hear(directory: Path) -> str:
    """Rank 1 takes no part, as one that is suspended, until the others have given it up."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(channel, "SILENCE_LIMIT", timedelta(seconds=6))
        dist.barrier()  # the limit holds for making the group too
        world, said = Channel(asyncio.Event()), ""
        if dist.get_rank() == 1:
            while len([*directory.iterdir()]) < dist.get_world_size() - 1:
                time.sleep(0.05)
            return ""
        try:
            asyncio.run(world.send(RankCall("anything")) if dist.get_rank() == 0 else world.receive())
        except WorldError as error:
            said = str(error)
        (directory / str(dist.get_rank())).touch()
        return said


@pytest.mark.slow
def test_a_rank_that_is_suspended_is_named_within_the_stated_time(worlds: Worlds, tmp_path: Path):
    began = time.monotonic()
    first, _, last = worlds.run(3, hear, tmp_path)
    assert first.startswith("rank 0 of the learner lost rank 1, silent for 6 s: ")
    assert last.startswith("rank 2 of the learner lost rank 0: ")
    assert time.monotonic() - began < 60


def test_a_rank_that_lost_another_does_not_wait_for_its_own_thread():
    never = threading.Event()
    with suppress(ExceptionGroup), train_thread() as thread:
        waiting = thread.submit(never.wait, 60)
        raise ExceptionGroup("as of a task group", [WorldError("rank 0 of the learner lost rank 1")])
    assert not waiting.done()
    never.set()


async def test_other_errors_of_a_rank_are_its_own():
    async def fails() -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        await translated(fails())
