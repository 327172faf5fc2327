"""A backend as the run's learner had it at some step: for its resume, and for those who look on or back."""

from collections.abc import Callable
from pathlib import Path

import structlog

from learner.backends.contract.backend import Backend
from learner.backends.factory import build_backend, rounding_of
from learner.checkpoint.commit import load_checkpoint
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.config.process_settings import LearnerSettings
from learner.distributed.process_group import use_threads
from learner.initial.initial import Initial
from learner.initial.unfit_settings import critic_source, refuse_unfit
from learner.logprobs.frozen_policies import hold_frozen_policies
from learner.model_directories.checkpoint_manifest import adapters_beside
from learner.progress.progress import Progress
from learner.step.warmup import finish_warm_up

log = structlog.get_logger()


def restore_backend(
    settings: LearnerSettings, initial: Initial, checkpoint: Path | None, progress: Progress,
    parallel: ParallelConfig, *, verified: bool = False,
) -> Backend:  # fmt: skip
    """Return the backend of `checkpoint`, whose `progress` this is; without one, of the initial model, with
    the optimizer of the run that it is from where `model.from_optimizer` says so.

    Model, optimizer, critic, frozen policies, random generators and the stage's threads are as they were
    then. A run that was done trains on. Every rank calls this, in a world divided as `parallel` says. The
    files of a `verified` checkpoint are not read twice. Raises `StorageError` for a checkpoint that is
    missing or damaged, `ConfigError` for another model's or another critic's, and as `refuse_unfit` does."""
    refuse_unfit(settings, initial, parallel)
    rounding = rounding_of(settings.learner, settings.model)
    # a run without a warm-up begins in this stage too, but takes no step in it
    stage = settings.warmup if progress.stage == "warmup" and settings.warmup.steps else settings.learner
    backend = build_backend(
        settings.model,
        initial.hf_config,
        initial.state,
        stage.optimizer,
        parallel,
        critic_source(settings, initial),
        backend=settings.learner.backend,
        lora=settings.learner.lora,
        mtp=settings.learner.mtp,
        images=initial.images,
    )
    if rounding is not None:
        backend.compute_with(rounding)
    if settings.learner.fp8_matmul:
        backend.multiply_in_fp8()
    if checkpoint is None:
        _go_on_from_other_run(backend, settings, stage.optimizer)
    else:
        load_checkpoint(backend, checkpoint, verified=verified)
        progress.stage = "rl" if progress.stage == "done" else progress.stage
        log.info("resumed", checkpoint=str(checkpoint), stage=progress.stage, step=progress.step)
    hold_frozen_policies(backend, settings, settings.learner, stage=progress.stage, step=progress.step)
    use_threads(stage.threads, backend.size_bytes)
    return backend


def _go_on_from_other_run(backend: Backend, settings: LearnerSettings, optimizer: OptimizerConfig) -> None:
    """Give the backend what goes on from the run that this one begins with: its adapters, and its optimizer
    where `model.from_optimizer` says so."""
    adapters = adapters_beside(settings.model_directory)
    if adapters is None and not settings.model.from_optimizer:
        return
    load_checkpoint(backend, adapters or settings.model_directory)
    backend.frozen.keep_only(set())  # that run's reference is not what this run begins with
    if not settings.model.from_optimizer:
        backend.set_optimizer(optimizer)


def restore_alone(
    settings: LearnerSettings, initial: Initial, checkpoint: Path | None, progress: Progress, *,
    stopped: Callable[[], bool] = lambda: False,
) -> Backend:  # fmt: skip
    """Restore a backend in one process, whatever layout the learner had, and finish the warm-up.

    It takes the same steps as the learner's, so the weights after it are the same. When `stopped` comes
    before its end, the stage stays "warmup"."""
    backend = restore_backend(settings, initial, checkpoint, progress, _alone(settings.learner.parallel))
    if progress.stage == "warmup":
        finish_warm_up(backend, settings, initial.demonstrations, progress, stopped)
    return backend


def _alone(parallel: ParallelConfig) -> ParallelConfig:
    """Return the settings that one process has to keep, so that the learner's checkpoints fit."""
    return ParallelConfig(distributed_optimizer=parallel.distributed_optimizer, recompute=parallel.recompute)
