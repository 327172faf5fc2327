"""A trainer as the run's learner had it at some step, for those who look on or look back."""

from collections.abc import Callable
from pathlib import Path

import torch

from learner.checkpoint import load_checkpoint
from learner.config import UNDIVIDED, SFTLoss
from learner.progress import Progress
from learner.service import Initial
from learner.settings import LearnerSettings
from learner.trainer import Trainer


def trainer_at(
    settings: LearnerSettings, initial: Initial, progress: Progress, checkpoint: Path | None, *,
    stopped: Callable[[], bool] = lambda: False,
) -> Trainer:  # fmt: skip
    """The trainer of a checkpoint, whose `progress` this is, or of the initial model without one.

    What is left of the warm-up is done first, unless `stopped` comes: then the stage stays "warmup". It takes
    the same steps as the learner's, so the weights after it are the same. Raises `StorageError` for a
    checkpoint that is missing or damaged, `ConfigError` for another model's.
    """
    warming = progress.stage == "warmup"
    optimizer = settings.warmup.optimizer if warming else settings.learner.optimizer
    alone = UNDIVIDED.model_copy(
        update={"distributed_optimizer": settings.learner.parallel.distributed_optimizer}
    )
    trainer = initial.trainer(settings, optimizer, alone)
    if checkpoint is not None:
        load_checkpoint(trainer, checkpoint)
    if not warming or _warm_up(trainer, settings, initial, progress, stopped):
        progress.stage = "rl"
    torch.set_num_threads(settings.learner.threads)
    return trainer


def _warm_up(
    trainer: Trainer, settings: LearnerSettings, initial: Initial, progress: Progress,
    stopped: Callable[[], bool],
) -> bool:  # fmt: skip
    """Whether the stage is complete."""
    warmup, batch = settings.warmup, settings.learner.batch
    if initial.demonstrations is not None:
        torch.set_num_threads(warmup.threads)
        while progress.warmup_step < warmup.steps:
            if stopped():
                return False
            micro_batches = initial.demonstrations.step(progress.warmup_step, warmup, batch)
            trainer.train_step(micro_batches, SFTLoss(), temperature=1.0, policy_version=0)
            progress.warmup_step += 1
        progress.policy_version += 1
    progress.trains_from = progress.policy_version
    trainer.set_optimizer(settings.learner.optimizer)
    return True
