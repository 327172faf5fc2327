"""What gloo raises where a rank is lost is told as that; other errors stay what they are."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from bus.errors import WorldError
from learner.world.rank import translated


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


async def test_other_errors_of_a_rank_are_its_own():
    async def fails() -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        await translated(fails())
