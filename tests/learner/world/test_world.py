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


def calls(directory: Path) -> tuple[float, tuple[str, ...]]:
    return asyncio.run(_calls(directory))


async def _calls(directory: Path) -> tuple[float, tuple[str, ...]]:
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
            return 0.0, rank.notes
        async with world.led(stop):
            await world.send(OwnRank.note, "at once")
            return await world.call(OwnRank.weighted_sum, [1.0, 10.0], scale=2.0), rank.notes


def test_a_method_of_rank_is_called_without_being_named_anywhere_else(tmp_path):
    assert calls(tmp_path) == (2.0, ("at once",))


@pytest.mark.slow
def test_it_is_called_on_all_ranks(worlds, tmp_path):
    notes = ("at once",)
    assert worlds.run(2, calls, tmp_path) == [(22.0, notes), (0.0, notes)]
