"""A backend as the run's learner had it at some step, for those who look on or look back."""

from collections.abc import Callable
from pathlib import Path

import torch

from learner.backends.base import Backend
from learner.checkpoint.commit import load_checkpoint
from learner.config.algorithm import SFTLoss
from learner.config.parallel import ParallelConfig
from learner.progress import Progress
from learner.scoring.frozen_policies import hold_frozen_policies
from learner.service import Initial, new_backend
from learner.settings import LearnerSettings


def backend_at(
    settings: LearnerSettings, initial: Initial, progress: Progress, checkpoint: Path | None, *,
    stopped: Callable[[], bool] = lambda: False,
) -> Backend:  # fmt: skip
    """One process's backend of a checkpoint, whose `progress` this is, or without one of the initial model.

    What is left of the warm-up is done first, unless `stopped` comes: then the stage stays "warmup". It takes
    the same steps as the learner's, so the weights after it are the same. Raises `StorageError` for a
    checkpoint that is missing or damaged, `ConfigError` for another model's.
    """
    warming = progress.stage == "warmup"
    optimizer = settings.warmup.optimizer if warming else settings.learner.optimizer
    backend = new_backend(settings, initial, optimizer, _alone(settings.learner.parallel))
    if checkpoint is not None:
        load_checkpoint(backend, checkpoint)
    hold_frozen_policies(backend, settings, settings.learner, stage=progress.stage, step=progress.step)
    if not warming or _warm_up(backend, settings, initial, progress, stopped):
        progress.stage = "rl"
    torch.set_num_threads(settings.learner.threads)
    return backend


def _alone(parallel: ParallelConfig) -> ParallelConfig:
    """What of it one process has to keep, so that the learner's checkpoints fit."""
    return ParallelConfig(distributed_optimizer=parallel.distributed_optimizer, recompute=parallel.recompute)


def _warm_up(
    backend: Backend, settings: LearnerSettings, initial: Initial, progress: Progress,
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
            backend.train_step(micro_batches, SFTLoss(), temperature=1.0, policy_version=0)
            progress.warmup_step += 1
        progress.policy_version += 1
    progress.trains_from = progress.policy_version
    backend.set_optimizer(settings.learner.optimizer)
    hold_frozen_policies(backend, settings, settings.learner, stage="rl", step=0)
    return True
