"""`launch learner`: prepare the model or resume its checkpoint, then train."""

import asyncio
import secrets
from pathlib import Path

import structlog
import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from bus.connection import Bus
from bus.errors import ConfigError
from bus.roles import guarded, hold_role
from learner.checkpoint import latest_checkpoint, load_checkpoint, read_extra
from learner.conversion.files import load_hf_directory, load_tokenizer
from learner.parallel import init_world
from learner.progress import Progress
from learner.scratch import ensure_model_directory
from learner.settings import LearnerSettings
from learner.train import Learner
from learner.trainer import Trainer
from learner.warmup import Demonstrations
from storage.generators import load_demonstrations

log = structlog.get_logger()


async def run(
    bus: Bus, settings: LearnerSettings, demonstrations: Path | None, stop: asyncio.Event
) -> Progress:
    """Train until the configured end or `stop`; returns how far it came.

    Holds the run's learner role meanwhile, and raises `FencedError` if another learner takes it over.
    """
    incarnation = secrets.token_hex(4)
    async with hold_role(bus, "learner", incarnation) as renewing:
        learner = await asyncio.to_thread(build, bus, settings, demonstrations, incarnation, stop)
        await guarded(learner.run(), renewing)
        return learner.progress


def build(
    bus: Bus, settings: LearnerSettings, demonstrations: Path | None, incarnation: str, stop: asyncio.Event
) -> Learner:
    """Everything that torch needs before the first step; takes seconds, so it runs in a thread."""
    torch.manual_seed(settings.seed)
    if settings.model.path is None:
        ensure_model_directory(settings.model_directory, settings.model.scratch, seed=settings.seed)
    hf_config, state = load_hf_directory(settings.model_directory)
    tokenizer = load_tokenizer(settings.model_directory)
    refuse_misfit(hf_config, tokenizer, settings.model_directory)
    rows = _demonstrations(settings, demonstrations, tokenizer, hf_config)
    init_world(settings.learner.parallel)
    latest = latest_checkpoint(settings.checkpoints)
    progress = Progress.from_json(read_extra(latest)) if latest else Progress()
    optimizer = settings.warmup.optimizer if progress.stage == "warmup" else settings.learner.optimizer
    trainer = Trainer(
        hf_config,
        state,
        optimizer,
        dtype=getattr(torch, settings.model.dtype),
        parallel=settings.learner.parallel,
    )
    if latest is not None:
        load_checkpoint(trainer, latest)
        progress.stage = "rl" if progress.stage == "done" else progress.stage
        log.info("resumed", checkpoint=str(latest), stage=progress.stage, step=progress.step)
    return Learner(bus, settings, trainer, progress, demonstrations=rows, incarnation=incarnation, stop=stop)


def refuse_misfit(hf_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Raise `ConfigError` when the tokenizer is not this model's."""
    if len(tokenizer) > hf_config.vocab_size:
        raise ConfigError(
            f"{directory}: the tokenizer has {len(tokenizer)} tokens, the model embeds "
            f"{hf_config.vocab_size}: they do not belong together"
        )
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
