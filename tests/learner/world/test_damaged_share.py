"""A group that another rank than 0 cannot read is replaced, and the world of ranks goes on."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from bus.config import BusConfig
from bus.connection import Bus
from bus.requests import GroupRef
from bus.server.nats_server import NatsServer
from learner.backends.factory import build_backend
from learner.config.learner import LearnerConfig
from learner.config.model import ModelConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.progress.progress import Progress
from learner.run.train import Learner
from learner.world.channel import Channel
from learner.world.rank import Rank
from learner.world.world import World, divided
from storage.client.reader import ReplayReader
from storage.store.segments import FILE
from storage.weights.blob_stores import BusBlobs
from tests.learner import worlds as of_ranks
from tests.learner.mini_run import MiniRun
from tests.learner.tiny import hf_state, tiny_model
from tests.learner.world.prefetch_settings import flip_a_bit
from tests.learner.worlds import Worlds
from tests.storage.serving import SHARDS, send_groups, serving, until

pytestmark = [pytest.mark.nats, pytest.mark.slow, pytest.mark.usefixtures("quick")]
RANKS = 2


def learn(url: str, directory: Path) -> int:
    """Take one step; return how many were taken."""
    return asyncio.run(_learn(url, directory))


async def _learn(url: str, directory: Path) -> int:
    model, stop = tiny_model(vocab_size=1000), asyncio.Event()
    model.config.save_pretrained(directory / "model")
    settings = MiniRun(None, directory, None, directory / "none").settings()
    settings = replace(settings, learner=LearnerConfig(steps=1))
    backend = build_backend(
        ModelConfig(dtype="float32"), model.config, hf_state(model), OptimizerConfig(), ParallelConfig()
    )
    async with Bus.connect(BusConfig(url=url), "test", name=f"rank {dist.get_rank()}") as bus:
        with closing(ReplayReader(bus, "a")) as reader, ThreadPoolExecutor(1) as thread:
            rank = Rank(backend, settings, reader=reader, demonstrations=None, thread=thread)
            world = World(Channel(stop), rank, settings)
            if dist.get_rank() > 0:
                async with rank.publishing_to(BusBlobs(bus, dist.get_rank())):
                    await world.follow()
                return 1
            progress = Progress(stage="rl")
            learner = Learner(
                bus, settings, world, progress,
                reader=reader, store=BusBlobs(bus), incarnation="a", stop=stop,
            )  # fmt: skip
            async with world.led(stop):
                await learner.run()
            return progress.step


async def test_the_group_is_given_up_and_refunded_and_the_step_trains_on_others(
    bus: Bus, server: NatsServer, worlds: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(of_ranks, "TIMEOUT_S", 200)  # a step and an export, on a machine that may be busy
    refs = [GroupRef(lease_id=n, shard=n % SHARDS, tokens=16) for n in range(2)]
    [damaged] = divided(refs, RANKS, lambda ref: ref.tokens)[1]  # the share of rank 1
    others = [n for n in range(3) if n != damaged.lease_id]
    async with serving(bus, tmp_path / "storage") as storage:
        learning = asyncio.create_task(asyncio.to_thread(worlds.run, RANKS, learn, server.url, tmp_path))
        await until(lambda: len(storage.ledger.rolling_out) == 4, seconds=120)  # both ranks load torch first
        await send_groups(bus, [damaged.lease_id])
        await until(lambda: damaged.lease_id in storage.ledger.stored, seconds=60)
        segment = tmp_path / "storage" / str(damaged.shard) / "segment_00000000"
        flip_a_bit(segment / FILE, damaged.lease_id)
        await send_groups(bus, others)
        assert await learning == [1, 1]
        assert [use.lease_id for use in storage.ledger.uses(1)] == others
        assert storage.ledger.reasons == {"damaged": 1}
        assert storage.ledger.account().balanced()
