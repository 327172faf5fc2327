"""Rank 0 calls, the other ranks follow: a new call is one method of `Rank`, and nothing else."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from learner.backends.factory import build_backend
from learner.config.model import ModelConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.world.channel import Channel
from learner.world.rank import Rank
from learner.world.world import World
from tests.learner.mini_run import MiniRun
from tests.learner.tiny import hf_state, tiny_model


class OwnRank(Rank):
    notes: tuple[str, ...] = ()

    async def weighted_sum(self, values: list[float], *, scale: float) -> float:
        """Each rank gives one of `values`, from this one method."""
        total = torch.tensor(values[dist.get_rank()] * scale)
        await self.in_thread(lambda: dist.all_reduce(total))
        return float(total)

    def note(self, text: str) -> None:
        self.notes += (text,)

    async def fail_on_the_first(self) -> None:
        if dist.get_rank() == 0:
            raise ValueError("on rank 0")

    async def asked_until_all_have_fetched(self, times: int) -> int:
        """Return how often the ranks asked each other; the groups of the last one come at that question."""
        asked, enough = 0, asyncio.Event()
        if dist.get_rank() < dist.get_world_size() - 1:
            enough.set()
        in_thread = self.in_thread

        async def counted(work):
            nonlocal asked
            asked += 1
            if asked == times:
                enough.set()
            return await in_thread(work)

        async def arriving():
            await enough.wait()
            return []

        self.in_thread = counted
        self._fetching[1] = (), asyncio.create_task(arriving())
        while (readable := await self.fetched_by_all(1)) is None:
            pass
        assert readable
        self.in_thread = in_thread
        return asked


def calls(directory: Path) -> tuple[float, tuple[str, ...], int]:
    return asyncio.run(_calls(directory))


async def _calls(directory: Path) -> tuple[float, tuple[str, ...], int]:
    model, stop = tiny_model(), asyncio.Event()
    settings = MiniRun(None, directory, None, directory / "none").settings()
    backend = build_backend(
        ModelConfig(dtype="float32"), model.config, hf_state(model), OptimizerConfig(), ParallelConfig()
    )
    with ThreadPoolExecutor(1) as thread:
        rank = OwnRank(backend, settings, reader=None, demonstrations=None, thread=thread)
        world = World(Channel(stop), rank, settings)
        if dist.get_rank() > 0:
            await world.follow()
            return 0.0, rank.notes, 0
        async with world.led(stop):
            await world.send(OwnRank.note, "at once")
            total = await world.call(OwnRank.weighted_sum, [1.0, 10.0], scale=2.0)
            asked = await world.call(OwnRank.asked_until_all_have_fetched, 4)
            assert world.takes_calls
            with pytest.raises(ValueError, match="on rank 0"):
                await world.call(OwnRank.fail_on_the_first)
            assert world.takes_calls == (dist.get_world_size() == 1)
            return total, rank.notes, asked


def test_a_method_of_rank_is_called_without_being_named_anywhere_else(tmp_path):
    total, notes, _ = calls(tmp_path)
    assert (total, notes) == (2.0, ("at once",))


@pytest.mark.slow
def test_it_is_called_on_all_ranks(worlds, tmp_path):
    [(total, notes, asked), other] = worlds.run(2, calls, tmp_path)
    assert (total, notes) == (22.0, ("at once",))
    assert other == (0.0, ("at once",), 0)
    assert asked >= 4  # while a rank waits for its groups, no other stands in a collective for as long
