"""Refuses a model that is larger than this host's GPUs, memory or disk, by what is certain to be needed.

What depends on lengths, such as activations, is not counted: `launch plan` computes it."""

import shutil
from pathlib import Path

from transformers import PretrainedConfig

from bus.errors import ConfigError
from bus.process.host_limits import memory_bytes
from launch.plan.memory import (
    checkpoint_bytes,
    held_policies,
    learner_rank,
    publication_copies,
    without_passes,
)
from launch.plan.plan import GIB, model_of
from launch.settings.run_config import RunConfig

PLAN = "`launch plan` with the same settings says what fits"


def refuse_too_large(config: RunConfig, hf_config: PretrainedConfig) -> None:
    """Raise `ConfigError` for a model whose training state is larger than a GPU, or than this host's memory,
    and for one whose checkpoint has no room on the disk of the run."""
    import torch

    on_gpu = torch.cuda.is_available()
    model = model_of(config, hf_config, on_gpu=on_gpu)
    world = config.learner.world
    ranks = world.processes * world.nodes
    rank = without_passes(learner_rank(model, config.learner, ranks, 1))
    published, saved = model.parameters * model.item_bytes, checkpoint_bytes(model, config.learner)
    named = f"{config.model.path or 'the scratch model'}, {model.parameters / 1e9:.2f} billion weights"
    on_host = publication_copies(model, config.learner, ranks) * published
    on_host += held_policies(model, config.learner, config.warmup, rank, ranks) * world.processes
    if on_gpu:
        room = torch.cuda.get_device_properties(0).total_memory
        _refuse(named, "of a GPU by weights, gradients and optimizer", rank.state, room, "learner.parallel")
        on_host += saved * world.processes // ranks  # to which checkpoints are copied
    else:
        on_host += rank.state * world.processes
    if config.actors.engine.in_process:
        on_host += 2 * published  # the engine's weights, and the newest in the actor
    where = "of the memory of this host or container by learner and actor"
    _refuse(named, where, on_host, memory_bytes(), "learner.lora.rank")
    free = shutil.disk_usage(_existing(config.directory)).free
    if saved + published > free:
        raise ConfigError(
            f"{named}: a checkpoint and a snapshot take {(saved + published) / GIB:.1f} GiB, and "
            f"{config.directory} has {free / GIB:.1f} GiB free: free some, or choose another --directory"
        )


def _refuse(named: str, where: str, needed: int, room: int, setting: str) -> None:
    if needed > room:
        raise ConfigError(
            f"{named}: {needed / GIB:.1f} GiB are taken {where}, and there are {room / GIB:.1f} GiB: "
            f"change {setting}, or take a smaller model; {PLAN}"
        )


def _existing(directory: Path) -> Path:
    return next(found for found in (directory.absolute(), *directory.absolute().parents) if found.exists())
