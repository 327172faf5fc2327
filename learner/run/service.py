"""`launch learner`: prepare the model or resume its checkpoint, then train."""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog
import torch
import torch.distributed as dist

from bus.connection import Bus
from bus.connection.roles import guarded, hold_role
from bus.connection.status import Activity, report_status
from bus.errors import ConfigError, WorldError, leaves
from bus.process.process_tuning import few_collections, return_freed_memory
from learner.algorithms.plugin import refuse_bad_plugins
from learner.backends.factory import close_world, init_world
from learner.backends.quantised.matmul import refuse_gpu
from learner.checkpoint.commit import read_extra
from learner.checkpoint.newest_checkpoint import newest_whole
from learner.config.learner import LearnerConfig
from learner.config.process_settings import LearnerSettings
from learner.distributed.process_group import device, world_rank, world_size
from learner.initial.initial import prepare
from learner.logprobs.served_teachers import refuse_other_teachers
from learner.model_directories.dtypes import published_bytes, published_dtype
from learner.progress.progress import Progress
from learner.run.restore import restore_backend
from learner.run.train import Learner
from learner.world.channel import Channel
from learner.world.rank import Rank, in_thread
from learner.world.world import World
from storage.client.reader import ReplayReader
from storage.disk.atomic_files import make_directory
from storage.weights.blob_stores import BlobStore, blob_store, chosen_transport

log = structlog.get_logger()


async def run(
    bus: Bus,
    settings: LearnerSettings,
    demonstrations: Path | None,
    stop: asyncio.Event,
    *,
    begin: Callable[[], None] = lambda: None,
) -> Progress | None:
    """Be one rank of the learner until its configured end or `stop`; rank 0 returns how far it came.

    Rank 0 holds the run's learner role meanwhile, and raises `FencedError` if another learner takes it over;
    `begin` is called as soon as it holds it.
    Raises `WorldError` when another rank is gone."""
    number, incarnation = world_rank(), secrets.token_hex(4)
    with (
        closing(ReplayReader(bus, incarnation, read=settings.learner.read)) as reader,
        train_thread() as thread,
    ):
        building = partial(in_thread, thread, lambda: build(settings, demonstrations, reader, thread, stop))
        if number > 0:
            built = await building()
            async with built.world.rank.publishing_to(await _store(bus, settings, built, number)):
                await _follow(bus, built, number)
        else:
            async with hold_role(bus, "learner", incarnation) as renewing:
                begin()
                say_objective(settings.learner)
                built = await building()
                store = await _store(bus, settings, built, number)
                learner = Learner(
                    bus, settings, built.world, built.progress,
                    reader=reader, store=store, incarnation=incarnation, stop=stop,
                )  # fmt: skip
                await guarded(_lead(built.world, learner, stop), renewing)
        await in_thread(thread, close_world)  # not after a failure: it would wait for ranks that are gone
        return built.progress if number == 0 else None


async def _store(bus: Bus, settings: LearnerSettings, built: "Built", number: int) -> BlobStore:
    """Return the store of what a rank publishes."""
    configured = settings.learner.publication.transport
    transport = await chosen_transport(bus, configured, built.weights_bytes)
    return blob_store(bus, transport, settings.export.parent / "weights", number)


@contextmanager
def train_thread() -> Iterator[ThreadPoolExecutor]:
    """Give a thread for torch's work, which ends with what is inside, unless another rank was lost: it may
    wait for that one in a collective."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="train")
    waits = True
    try:
        yield thread
    except BaseException as error:
        waits = not any(isinstance(each, WorldError) for each in leaves(error))
        raise
    finally:
        thread.shutdown(wait=waits, cancel_futures=True)


def say_objective(learner: LearnerConfig) -> None:
    """Log what the objective is made of, and what of it is otherwise than in the papers that it is from."""
    log.info(
        "objective",
        advantage=learner.advantage.type,
        loss=learner.loss.type,
        correction=learner.used_correction.type,
        rejections=[rejection.type for rejection in learner.used_rejections],
        aggregation=learner.used_aggregation.type,
    )
    for difference in learner.differences_from_papers:
        log.warning("objective_differs_from_paper", difference=difference)


async def _lead(world: World, learner: Learner, stop: asyncio.Event) -> None:
    async with world.led(stop):
        with few_collections():
            await learner.run()


async def _follow(bus: Bus, built: "Built", number: int) -> None:
    ended = asyncio.Event()
    phrase = f"following rank 0 of {world_size()}"
    async with asyncio.TaskGroup() as tasks:
        status = report_status(
            bus, source=f"learner rank {number}", role="rank", look=lambda: Activity(phrase), stop=ended
        )
        tasks.create_task(status)
        with few_collections():
            await built.world.follow()
        ended.set()


@dataclass(frozen=True)
class Built:
    """Says what a rank has before the first step."""

    world: World
    progress: Progress
    weights_bytes: int
    """Size of the published weights before any quantisation."""


def build(
    settings: LearnerSettings, demonstrations: Path | None, reader: ReplayReader,
    thread: ThreadPoolExecutor, stop: asyncio.Event,
) -> Built:  # fmt: skip
    """Return everything that torch needs before the first step; takes seconds. Every rank calls it in
    `thread`."""
    refuse_bad_plugins(settings.learner)  # a wrong name shows before the model is loaded
    initial = prepare(settings, demonstrations)
    refuse_other_teachers(
        settings.learner, settings.model_directory, stop.is_set, engine_context=settings.engine_context
    )
    world = settings.learner.world
    init_world(settings.learner.parallel, world.collective_timeout_s, backend=settings.learner.backend)
    if settings.learner.fp8_matmul:  # who looks back at the run does without, at the speed of float32
        refuse_gpu("learner.fp8_matmul=true")
    refuse_unshared(settings.checkpoints)
    channel = Channel(stop)
    latest = newest_whole(settings.checkpoints)
    progress = Progress.from_json(read_extra(latest)) if latest else Progress()
    backend = restore_backend(settings, initial, latest, progress, settings.learner.parallel, verified=True)
    rank = Rank(
        backend, settings, reader=reader, demonstrations=initial.demonstrations, thread=thread,
        heldout_demonstrations=initial.heldout_demonstrations, images=initial.images, whole=initial.whole,
    )  # fmt: skip
    return_freed_memory()  # of what was read
    backend.prepare_checkpoints()
    size = published_bytes(initial.state, published_dtype(settings.learner, settings.model))
    return Built(World(channel, rank, settings), progress, size)


SEEN_WITHIN_S = 10.0
"""Network file systems show a new file to other hosts after some seconds."""


def refuse_unshared(directory: Path) -> None:
    """Raise `ConfigError` on every rank when one does not see what rank 0 writes in `directory`. Each rank
    writes its part of a checkpoint. Every rank calls this."""
    if dist.get_world_size() == 1:
        return
    number = torch.randint(1 << 62, (1,), device=device())
    dist.broadcast(number, 0)  # a new name each time: a mark of an earlier start proves nothing
    mark = directory / f".seen-{int(number):x}"
    if dist.get_rank() == 0:
        make_directory(directory)
        mark.touch()
    seen = torch.tensor(int(_appears(mark)), device=device())
    dist.all_reduce(seen)  # also waits until every rank has looked: only then may the mark go
    if dist.get_rank() == 0:
        mark.unlink()
    if int(seen) < dist.get_world_size():
        raise ConfigError(
            f"{dist.get_world_size() - int(seen)} ranks do not see rank 0's files in {directory}: the hosts "
            "of a learner share the run's directory; name one on a shared file system with --directory"
        )


def _appears(mark: Path) -> bool:
    deadline = time.monotonic() + SEEN_WITHIN_S
    while not mark.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
