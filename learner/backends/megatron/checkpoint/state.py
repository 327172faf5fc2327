"""A checkpoint holds a model, its optimizer and its own frozen policies, as megatron-core shards them."""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from pydantic import JsonValue
from torch.distributed.checkpoint.api import CheckpointException

from bus.errors import ConfigError, StorageError
from learner.algorithms.entropy_bonus import EntropyBonus
from learner.backends.megatron.checkpoint.writer import CopyBuffers, Staged, install_in_process_writer, stage
from learner.backends.megatron.core import (
    CheckpointingException,
    ShardedObject,
    dist_checkpointing,
    parallel_state,
)
from learner.backends.megatron.model.model import PolicyModel
from learner.backends.megatron.optimizer.optimizer import load_optimizer_state

if TYPE_CHECKING:  # which calls this module
    from learner.backends.megatron.trainer import Trainer

SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
    "non_homogeneous_layers": True,
}
"""Says how megatron-core lays out the state: this way another number of ranks can load it."""

# What megatron-core still uses of torch. For good: filters belong to the process, not to a thread.
for _message in ("`load_state_dict` is deprecated", "Please use DTensor instead"):
    warnings.filterwarnings("ignore", message=_message)


def stage_state(trainer: "Trainer", directory: Path, buffers: CopyBuffers) -> Staged:
    """Copy the state of `trainer` to the host, into `buffers` what is on a GPU. Every rank calls this."""
    install_in_process_writer()
    trainer.settle_parameters()
    request = dist_checkpointing.save(
        _sharded_state(trainer, trainer.frozen.own, is_loading=False),
        str(directory),
        async_sharded_save=True,
        content_metadata=dict(SHARDING),
    )
    return stage(request, buffers)


def load_state(trainer: "Trainer", directory: Path, training: Mapping[str, Any]) -> None:
    """Restore `trainer` to what it was. Every rank calls this. Raises `StorageError` if it cannot be read."""
    wanted = _sharded_state(trainer, training.get("policies", []), is_loading=True)
    if training["ranks"] != dist.get_world_size():  # whose would they be?
        del wanted["rng"]
    try:
        state = dist_checkpointing.load(wanted, str(directory))
    except (CheckpointingException, CheckpointException, RuntimeError, OSError) as error:
        raise StorageError(f"cannot read checkpoint {directory}: {error}") from error
    for name, chunk in _chunks(trainer).items():
        chunk.load_state_dict(state[name])
    for tag, weights in state["policies"].items():
        trainer.frozen.restore(tag, list(weights.values()))
    load_optimizer_state(trainer.optimizer, state["optimizer"])
    trainer.steps_done, trainer.updates_done = training["steps_done"], training["updates_done"]
    bonus = training.get("entropy_bonus")
    trainer.entropy_bonus = EntropyBonus.restored(bonus) if bonus else None
    if "rng" in state:
        _set_rng_state(state["rng"])


def training_state(trainer: "Trainer") -> dict[str, JsonValue]:
    """Return where the trainer stands, and what of it must be the same to go on from there."""
    return {
        "steps_done": trainer.steps_done,
        "updates_done": trainer.updates_done,
        "ranks": dist.get_world_size(),
        "distributed_optimizer": trainer.parallel.distributed_optimizer,
        "frozen": [*sorted(trainer.trainable.frozen(trainer.hf_config))],
        "policies": [*sorted(trainer.frozen.own)],
        "entropy_bonus": trainer.entropy_bonus.saved() if trainer.entropy_bonus else None,
    }


def refuse_other_training(directory: Path, training: Mapping[str, Any], trainer: "Trainer") -> None:
    """Raise `ConfigError` when a checkpoint of that `training_state` does not fit `trainer`."""
    if (saved := training["distributed_optimizer"]) != trainer.parallel.distributed_optimizer:
        raise ConfigError(
            f"checkpoint {directory} was saved with learner.parallel.distributed_optimizer={saved}: "
            "set that again"
        )
    frozen = set(training["frozen"]) ^ trainer.trainable.frozen(trainer.hf_config)
    if frozen:
        raise ConfigError(
            f"checkpoint {directory} was trained with other weights frozen ({len(frozen)} differ, as "
            f"{min(frozen)}): its optimizer does not fit; keep model.freeze and model.train_only, or start a "
            "new run from its weights with --model.path"
        )


def _sharded_state(trainer: "Trainer", policies: Iterable[str], *, is_loading: bool) -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {**SHARDING, "dp_cp_group": group}
    chunks = {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in _chunks(trainer).items()}
    with torch.no_grad():
        optimizer = trainer.optimizer.sharded_state_dict(
            chunks if len(chunks) > 1 else chunks["model"], is_loading=is_loading, metadata=dict(SHARDING)
        )
    frozen = {tag: _sharded_policy(trainer, tag, metadata) for tag in sorted(policies)}
    return {**chunks, "optimizer": optimizer, "rng": _sharded_rng_state(), "policies": frozen}


def _sharded_policy(trainer: "Trainer", tag: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights of a frozen policy, cut and named as the model's own behind its tag."""
    prefix = f"{tag}."
    pieces = zip(_chunks(trainer).items(), trainer.frozen.weights(tag), strict=True)
    return {
        name: {
            key.removeprefix(prefix): replace(entry, data=weights[key.removeprefix(prefix)])
            for key, entry in chunk.sharded_state_dict(prefix=prefix, metadata=metadata).items()
            if key.removeprefix(prefix) in weights
        }
        for (name, chunk), weights in pieces
    }


def _chunks(trainer: "Trainer") -> dict[str, PolicyModel]:
    """Return the pieces of the model by the names that megatron-core's optimizer expects."""
    if len(trainer.chunks) == 1:
        return {"model": trainer.chunks[0]}
    return {f"model{number}": chunk for number, chunk in enumerate(trainer.chunks)}


def _sharded_rng_state() -> ShardedObject:
    """Return the states of this rank's random generators, one of as many as there are ranks."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return ShardedObject("rng", states, (dist.get_world_size(),), (dist.get_rank(),))


def _set_rng_state(states: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
