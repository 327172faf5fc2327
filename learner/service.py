"""`launch learner`: prepare the model or resume its checkpoint, then train."""

import asyncio
import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog
import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from bus.connection import Bus
from bus.errors import ConfigError
from bus.process_tuning import few_collections
from bus.roles import guarded, hold_role
from bus.status import report_status
from learner.algorithms.advantages.estimator import advantage_estimator
from learner.backends.base import Backend
from learner.backends.factory import build_backend, close_world, init_world
from learner.checkpoint.commit import latest_checkpoint, load_checkpoint, read_extra
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.data.demonstrations import Demonstrations
from learner.lazy_weights import State
from learner.model_directory import load_hf_directory, load_tokenizer, refuse_other_vocabulary
from learner.progress import Progress
from learner.scoring.frozen_policies import hold_frozen_policies
from learner.scratch_model import ensure_model_directory
from learner.settings import LearnerSettings
from learner.train import Learner
from learner.world.channel import Channel
from learner.world.hosts import refuse_unshared
from learner.world.process_group import world_rank, world_size
from learner.world.rank import Rank, in_thread
from learner.world.world import World
from storage.client.reader import ReplayReader
from storage.disk.atomic_files import one_at_a_time
from storage.prompts.generators import load_demonstrations

log = structlog.get_logger()


async def run(
    bus: Bus, settings: LearnerSettings, demonstrations: Path | None, stop: asyncio.Event
) -> Progress | None:
    """Be one rank of the learner until its configured end or `stop`; rank 0 returns how far it came.

    Rank 0 holds the run's learner role meanwhile, and raises `FencedError` if another learner takes it over.
    Raises `WorldError` when another rank is gone.
    """
    number, incarnation = world_rank(), secrets.token_hex(4)
    with (
        closing(ReplayReader(bus, incarnation, read=settings.learner.read)) as reader,
        ThreadPoolExecutor(1, thread_name_prefix="train") as thread,
    ):
        building = partial(in_thread, thread, lambda: build(settings, demonstrations, reader, thread, stop))
        if number > 0:
            built = await building()
            await _follow(bus, built, number)
        else:
            async with hold_role(bus, "learner", incarnation) as renewing:
                built = await building()
                learner = Learner(
                    bus, settings, built.world, built.progress,
                    reader=reader, incarnation=incarnation, stop=stop,
                )  # fmt: skip
                await guarded(_lead(built.world, learner, stop), renewing)
        await in_thread(thread, close_world)  # not after a failure: it would wait for ranks that are gone
        return built.progress if number == 0 else None


async def _lead(world: World, learner: Learner, stop: asyncio.Event) -> None:
    async with world.led(stop):
        with few_collections():
            await learner.run()


async def _follow(bus: Bus, built: "Built", number: int) -> None:
    ended = asyncio.Event()
    phrase = f"following rank 0 of {world_size()}"
    async with asyncio.TaskGroup() as tasks:
        status = report_status(
            bus, source=f"learner rank {number}", role="rank", look=lambda: (phrase, {}), stop=ended
        )
        tasks.create_task(status)
        with few_collections():
            await built.world.follow()
        ended.set()


@dataclass(frozen=True)
class Built:
    """What a rank has before the first step."""

    world: World
    progress: Progress


def build(
    settings: LearnerSettings, demonstrations: Path | None, reader: ReplayReader,
    thread: ThreadPoolExecutor, stop: asyncio.Event,
) -> Built:  # fmt: skip
    """Everything that torch needs before the first step; takes seconds. Every rank calls it in `thread`."""
    advantage_estimator(settings.learner.advantage)  # a wrong name shows before the model is loaded
    initial = prepare(settings, demonstrations)
    init_world(settings.learner.parallel)
    refuse_unshared(settings.checkpoints)
    channel = Channel(stop)
    latest = latest_checkpoint(settings.checkpoints)
    progress = Progress.from_json(read_extra(latest)) if latest else Progress()
    optimizer = settings.warmup.optimizer if progress.stage == "warmup" else settings.learner.optimizer
    backend = new_backend(settings, initial, optimizer, settings.learner.parallel)
    if latest is not None:
        load_checkpoint(backend, latest)
        progress.stage = "rl" if progress.stage == "done" else progress.stage
        log.info("resumed", checkpoint=str(latest), stage=progress.stage, step=progress.step)
    hold_frozen_policies(backend, settings, settings.learner, stage=progress.stage, step=progress.step)
    rank = Rank(backend, settings, reader=reader, demonstrations=initial.demonstrations, thread=thread)
    return Built(World(channel, rank, settings), progress)


@dataclass(frozen=True)
class Initial:
    """What a run trains from, before its first step."""

    hf_config: PretrainedConfig
    state: State
    """Weights by Hugging Face name."""
    demonstrations: Demonstrations | None
    """For the warm-up, if the run has one."""


def prepare(settings: LearnerSettings, demonstrations: Path | None) -> Initial:
    """Read the initial model, making the scratch model if need be, and the demonstrations.

    Raises `ConfigError` when model, tokenizer or demonstrations do not belong together.
    """
    torch.manual_seed(settings.seed)
    if settings.model.path is None:
        with one_at_a_time(settings.model_directory):
            ensure_model_directory(settings.model_directory, settings.model.scratch, seed=settings.seed)
    hf_config, state = load_hf_directory(settings.model_directory)
    tokenizer = load_tokenizer(settings.model_directory)
    refuse_misfit(hf_config, tokenizer, settings.model_directory)
    return Initial(hf_config, state, _demonstrations(settings, demonstrations, tokenizer, hf_config))


def new_backend(
    settings: LearnerSettings, initial: Initial, optimizer: OptimizerConfig, parallel: ParallelConfig
) -> Backend:
    """The backend with the initial model, in a world that is divided as `parallel` says."""
    return build_backend(settings.model, initial.hf_config, initial.state, optimizer, parallel)


def refuse_misfit(hf_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Raise `ConfigError` when the tokenizer is not this model's."""
    refuse_other_vocabulary(hf_config, tokenizer, directory)
    if tokenizer.chat_template is None:
        raise ConfigError(f"{directory}: the tokenizer has no chat template; prompts are rendered with it")


def _demonstrations(
    settings: LearnerSettings,
    path: Path | None,
    tokenizer: PreTrainedTokenizerBase,
    hf_config: PretrainedConfig,
) -> Demonstrations | None:
    if settings.warmup.steps == 0:
        return None
    if path is None:
        raise ConfigError("warmup.steps needs warmup.demonstrations, or data.task to generate some")
    return Demonstrations(
        load_demonstrations(path),
        tokenizer,
        context=hf_config.max_position_embeddings,
        seed=settings.seed,
    )
