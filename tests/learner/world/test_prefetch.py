"""The learner's loop against storage on a real bus: what arrives while it trains."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from transformers import Qwen3ForCausalLM

from bus.connection import Bus
from bus.errors import FencedError, StorageError
from learner.backends.megatron.checkpoint_state import StagedWrites
from learner.backends.megatron.trainer import Trainer
from learner.checkpoint import commit
from learner.config.optimizer import OptimizerConfig
from learner.progress.progress import Progress
from learner.publication.publisher import WeightPublisher
from learner.run import checkpointing
from learner.run.train import Learner
from learner.world.channel import Channel
from learner.world.rank import Rank
from learner.world.world import World
from storage.client.reader import ReplayReader
from storage.disk import checkpoints
from storage.store.segments import FILE
from storage.weights.blob_stores import BusBlobs
from tests.learner.tiny import tiny_config
from tests.learner.world.prefetch_settings import flip_a_bit, settings
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
        assert self.released.wait(100)
        return super().train_step(*args, **kwargs)


@contextmanager
def learning(
    bus: Bus, directory: Path, stop: asyncio.Event, save_every: int = 50
) -> Iterator[tuple[Learner, Held, ReplayReader]]:
    """A learner of a tiny model, not yet running, its backend and its reader."""
    model = Qwen3ForCausalLM(tiny_config(vocab_size=1000))
    model.config.save_pretrained(directory / "model")
    trainer = Held(model.config, model.state_dict(), OptimizerConfig())
    own = settings(directory, save_every)
    with (
        closing(ReplayReader(bus, "a")) as reader,
        ThreadPoolExecutor(1, thread_name_prefix="train") as thread,
    ):
        rank = Rank(trainer, own, reader=reader, demonstrations=None, thread=thread)
        world = World(Channel(stop), rank, own)
        progress = Progress(stage="rl")
        learner = Learner(
            bus, own, world, progress, reader=reader, store=BusBlobs(bus), incarnation="a", stop=stop
        )
        yield learner, trainer, reader


async def test_bodies_of_the_next_step_are_fetched_while_this_one_trains(bus: Bus, tmp_path: Path):
    stop = asyncio.Event()
    with learning(bus, tmp_path, stop) as (learner, trainer, reader):
        async with serving(bus, tmp_path / "storage"):
            training = asyncio.create_task(learner.run())
            await has(bus, "TASKS", 4)
            await send_groups(bus, range(4))  # two steps of two groups of two
            await until(lambda: trainer.entered.is_set() and reader.read["mapped"] == 8)
            assert learner.progress.step == 0
            stop.set()
            trainer.released.set()
            async with asyncio.timeout(60):
                await training
    assert learner.progress.step == 1


async def test_a_damaged_group_is_replaced_by_another_and_the_learner_goes_on(bus: Bus, tmp_path: Path):
    stop = asyncio.Event()
    with learning(bus, tmp_path, stop) as (learner, trainer, _), capture_logs() as logs:
        async with serving(bus, tmp_path / "storage") as storage:
            training = asyncio.create_task(learner.run())
            await has(bus, "TASKS", 4)
            await send_groups(bus, [0])
            await until(lambda: 0 in storage.ledger.stored)
            flip_a_bit(tmp_path / "storage" / "0" / "segment_00000000" / FILE)
            await send_groups(bus, [1, 2])
            await until(trainer.entered.is_set)
            assert [use.lease_id for use in storage.ledger.steps[1]] == [1, 2]
            assert storage.ledger.reasons == {"damaged": 1}
            assert storage.ledger.account().balanced()
            await has(bus, "TASKS", 5)  # another is rolled out in its place
            stop.set()
            trainer.released.set()
            async with asyncio.timeout(60):
                await training
    assert learner.progress.step == 1
    [line] = [line for line in logs if line["event"] == "groups_damaged"]
    assert line["log_level"] == "error"
    assert line["leases"] == [0]


async def test_a_failed_publication_ends_a_learner_that_waits_for_groups_of_that_version(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With `max_staleness` 0 no group comes before the version is published."""
    publish = WeightPublisher.publish

    async def publish_the_first(self: WeightPublisher, *args: object, policy_version: int, **named: object):
        if policy_version > 0:
            raise FencedError("another learner publishes")
        return await publish(self, *args, policy_version=policy_version, **named)

    monkeypatch.setattr(WeightPublisher, "publish", publish_the_first)
    with learning(bus, tmp_path, asyncio.Event()) as (learner, trainer, _):
        trainer.released.set()
        async with serving(bus, tmp_path / "storage"):
            training = asyncio.create_task(learner.run())
            await has(bus, "TASKS", 4)
            await send_groups(bus, range(2))  # one step, and no group for the next
            with pytest.raises(ExceptionGroup) as ended:
                async with asyncio.timeout(60):
                    await training
    assert ended.group_contains(FencedError, match="another learner publishes")
    assert learner.progress.step == 1


@pytest.mark.slow
async def test_training_goes_on_while_a_checkpoint_is_written_for_longer_than_it_lasts(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stop, on_disk = asyncio.Event(), asyncio.Event()
    written = Rank.written

    async def written_once_the_disk_is_done(rank: Rank) -> bool:
        return await written(rank) and on_disk.is_set()

    monkeypatch.setattr(Rank, "written", written_once_the_disk_is_done)
    with learning(bus, tmp_path, stop, save_every=1) as (learner, trainer, _):
        trainer.released.set()
        async with serving(bus, tmp_path / "storage"):
            training = asyncio.create_task(learner.run())
            await has(bus, "TASKS", 4)
            await send_groups(bus, range(4))
            await until(lambda: learner.progress.step == 2 and waits_for_a_batch(learner))
            assert checkpoints.steps(tmp_path) == []
            on_disk.set()
            await send_groups(bus, range(4, 6))
            assert "equal in 3 steps" not in alarm(learner)
            await until(lambda: learner.progress.step == 3 and waits_for_a_batch(learner))
            assert "the rewards within each group were equal in 3 steps in a row" in alarm(learner)
            stop.set()
            async with asyncio.timeout(60):
                await training
    assert checkpoints.steps(tmp_path) == [1, 3]  # that of step 2 was left out


@pytest.mark.slow
async def test_a_checkpoint_whose_disk_hangs_ends_the_learner(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write, released = StagedWrites.write, threading.Event()

    def hang(staged: StagedWrites) -> object:
        assert released.wait(60)
        return write(staged)

    monkeypatch.setattr(StagedWrites, "write", hang)
    for module in (checkpointing, commit):
        monkeypatch.setattr(module, "WRITING_TIMEOUT_S", 0.5)
    with learning(bus, tmp_path, asyncio.Event(), save_every=1) as (learner, trainer, _):
        trainer.released.set()
        async with serving(bus, tmp_path / "storage"):
            training = asyncio.create_task(learner.run())
            await has(bus, "TASKS", 4)
            await send_groups(bus, range(2))
            await until(lambda: learner.progress.step == 1 and waits_for_a_batch(learner))
            monkeypatch.setattr(learner._checkpoints, "_saving_since", -1.0)  # an hour later
            await send_groups(bus, range(2, 4))
            with pytest.raises(ExceptionGroup) as ended:
                async with asyncio.timeout(60):
                    await training
    released.set()
    assert ended.group_contains(StorageError, match="is not done after")


def alarm(learner: Learner) -> str:
    """Return what screens show of the learner as wrong."""
    return str(learner._look().values["alarm"])


def waits_for_a_batch(learner: Learner) -> bool:
    """Return whether all that follows a step has been done."""
    return learner._look().wait == "batch"
