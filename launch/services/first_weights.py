"""The model directory that a run begins with: named, made here, or of a checkpoint of another run."""

from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from launch.model_files.hub_revision import pin
from launch.model_files.model_directory import model_directory
from launch.run_view.run_files import Origin, RunFiles
from launch.run_view.source_run import chosen_checkpoint, refuse_other_origin, source_model
from launch.settings.run_config import RunConfig
from storage.disk.atomic_files import one_at_a_time
from storage.disk.run_directory import RunDirectory

if TYPE_CHECKING:
    from learner.initial.linked_checkpoint import Beginning

log = structlog.get_logger()


def first_model(config: RunConfig, run: RunDirectory) -> Path:
    """Return the run's model directory. That of a scratch model may be missing; a checkpoint of another run
    becomes one when it is first asked for. Raises `ConfigError` where there is no such model, run or
    checkpoint, and as `refuse_other_origin`."""
    refuse_other_origin(config, run)
    if config.model.from_run is not None:
        return _of_other_run(config, run)
    path = config.model.path
    return run.path / "model" if path is None else model_directory(pin(path, run))


def _of_other_run(config: RunConfig, run: RunDirectory) -> Path:
    from learner.initial.linked_checkpoint import link_checkpoint  # loads torch

    target = run.path / "model"
    with one_at_a_time(target):  # each rank of a learner comes here
        if RunFiles(run.path).origin is not None:
            return target
        checkpoint, origin = chosen_checkpoint(config.directory, str(config.model.from_run))
        begin = beginning(config, checkpoint, origin)
        path = config.model.path
        described = (
            source_model(config.directory, origin) if path is None else model_directory(pin(path, run))
        )
        link_checkpoint(begin, described, target, {"origin.json": origin.model_dump_json()})
        log.info("begins_with_other_run", source=str(origin), optimizer=config.model.from_optimizer)
    return target


def beginning(config: RunConfig, checkpoint: Path, origin: Origin) -> "Beginning":
    """Return what is asked of a checkpoint of another run. Loads torch."""
    from learner.initial.linked_checkpoint import Beginning

    other = RunDirectory(config.directory, origin.run).path
    of_another = RunFiles(other).origin is not None
    return Beginning(
        checkpoint=checkpoint,
        base=other / "model" if of_another else source_model(config.directory, origin),
        backend=config.learner.backend,
        lora=config.learner.lora,
        with_optimizer=config.model.from_optimizer,
        gives_scores=config.warmup.makes_reward_model,
    )
