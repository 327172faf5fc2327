"""The learner's loop against storage on a real bus: what arrives while it trains."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from transformers import Qwen3ForCausalLM

from bus.connection import Bus
from learner.backends.megatron.trainer import Trainer
from learner.config.learner import LearnerConfig
from learner.config.model import ModelConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.warmup import WarmupConfig
from learner.progress import Progress
from learner.settings import LearnerSettings
from learner.train import Learner
from learner.world.channel import Channel
from learner.world.rank import Rank
from learner.world.world import World
from storage.client.reader import ReplayReader
from storage.config import EvaluationConfig
from tests.learner.tiny import tiny_config
from tests.storage.conftest import quick  # noqa: F401 - a fixture
from tests.storage.serving import has, send_groups, serving, until

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]


class Held(Trainer):
    """Trains as soon as it is let."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.entered, self.released = threading.Event(), threading.Event()

    def train_step(self, *args: object, **kwargs: object) -> object:
        self.entered.set()
        assert self.released.wait(20)
        return super().train_step(*args, **kwargs)


def settings(directory: Path) -> LearnerSettings:
    return LearnerSettings(
        model=ModelConfig(),
        warmup=WarmupConfig(),
        learner=LearnerConfig(steps=9),
        evaluation=EvaluationConfig(every_versions=0),
        samples_per_prompt=2,
        seed=0,
        model_directory=directory / "model",
        checkpoints=directory,
        progress=directory / "progress.json",
        lineage=directory / "lineage.jsonl",
        export=directory / "export",
    )


async def test_bodies_of_the_next_step_are_fetched_while_this_one_trains(bus: Bus, tmp_path: Path):
    model = Qwen3ForCausalLM(tiny_config(vocab_size=1000))
    model.config.save_pretrained(tmp_path / "model")
    trainer = Held(model.config, model.state_dict(), OptimizerConfig())
    own, stop = settings(tmp_path), asyncio.Event()
    with (
        closing(ReplayReader(bus, "a")) as reader,
        ThreadPoolExecutor(1, thread_name_prefix="train") as thread,
    ):
        rank = Rank(trainer, own, reader=reader, demonstrations=None, thread=thread)
        world = World(Channel(stop), rank, own)
        learner = Learner(bus, own, world, Progress(stage="rl"), reader=reader, incarnation="a", stop=stop)
        async with serving(bus, tmp_path / "storage"):
            training = asyncio.create_task(learner.run())
            await has(bus, "TASKS", 4)
            await send_groups(bus, range(4))  # two steps of two groups of two
            await until(lambda: trainer.entered.is_set() and reader.read["mapped"] == 8, seconds=20)
            assert learner.progress.step == 0
            stop.set()
            trainer.released.set()
            async with asyncio.timeout(20):
                await training
    assert learner.progress.step == 1
