"""A checkpoint holds a model, its optimizer, its own frozen policies and its critic, as megatron-core shards
them."""

import queue
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import torch
import torch.distributed as dist
from pydantic import JsonValue
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX

from bus.errors import ConfigError, StorageError
from learner.backends.megatron.conversion.base import HEAD, is_trained_with_adapters
from learner.backends.megatron.core.megatron_core import (
    CheckpointingException,
    FileSystemWriterAsync,
    MegatronModule,
    MegatronOptimizer,
    ShardedObject,
    ShardedTensor,
    add_prefix_for_sharding,
    dist_checkpointing,
    filesystem_async,
    is_main_replica,
    nested_values,
    parallel_state,
    save_preprocess,
    torch_dist_strategy,
)
from learner.backends.megatron.fingerprint import differences_from, fingerprint
from learner.backends.megatron.optimizer.optimizer import load_optimizer_state
from learner.backends.shared.lora import refuse_other_adapters
from learner.backends.shared.trainable import refuse_other_frozen
from learner.backends.update.muon import refuse_other_optimizer
from learner.host_memory.copies import CopyBuffers, StateCopies
from learner.model_directories.checkpoint_manifest import file_digest

if TYPE_CHECKING:
    from learner.backends.megatron.critic import MegatronCritic
    from learner.backends.megatron.next_token_head import TrainedHead
    from learner.backends.megatron.trainer import Trainer


class InProcessWriter(FileSystemWriterAsync):  # type: ignore[misc]  # megatron-core is untyped
    """Writes this rank's files one after another, each fsynced. `stage` copies their contents before.

    Originally every save forks a process per file, and the first one spawns a manager that stays. In a
    learner full of threads a fork may inherit a held lock and hang, and a spawn imports the main program
    again. Here the state is copied, and a thread of the caller writes the copies."""

    def prepare_write_data(self, plan: Any, planner: Any) -> None:
        """Do what megatron-core's method of this name does, without its copies of all that is a view."""
        buckets = filesystem_async._split_by_size_and_type(self.thread_count, plan.items)
        names = (f"{plan.storage_data.prefix}{i}{DEFAULT_SUFFIX}" for i in range(len(buckets)))
        self.write_buckets = []
        for name, bucket in zip(names, filter(None, buckets), strict=False):
            resolved = [(item, planner.resolve_data(item)) for item in bucket]
            tensors = [(item, data.detach()) for item, data in resolved if isinstance(data, Tensor)]
            objects = [(item, data) for item, data in resolved if not isinstance(data, Tensor)]
            self.write_buckets.append((str(Path(self.checkpoint_dir, name)), name, (objects, tensors)))
        self.results_queue: queue.Queue[Any] | None = queue.Queue() if self.write_buckets else None

    @staticmethod
    def write_preloaded_data_multiproc(
        transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], results: "queue.Queue[Any]"
    ) -> None:
        """Do what megatron-core's method of this name does; put {bucket: results} or raise."""
        written: dict[int, Any] = {}
        for i, bucket in enumerate(buckets):
            outcomes: queue.Queue[Any] = queue.Queue()
            unfinished: queue.Queue[int] = queue.Queue()
            unfinished.put(i)
            FileSystemWriterAsync.write_preloaded_data(
                transforms, i, bucket, outcomes, unfinished, use_fsync=True
            )
            _, written[i] = outcomes.get_nowait()
            if isinstance(written[i], Exception):
                raise written[i]
        results.put(written)


def install_in_process_writer() -> None:
    """Make `dist_checkpointing.save` use `InProcessWriter`."""
    torch_dist_strategy.FileSystemWriterAsync = InProcessWriter


@dataclass(frozen=True)
class StagedWrites:
    """A rank's part of a checkpoint, which is not written yet."""

    writes: Callable[[], None]
    files: Sequence[Path]
    finalizers: Sequence[Callable[[], None]]
    copies: StateCopies
    """What is written: `keep` must be called before it changes."""

    def write(self) -> dict[str, str]:
        self.writes()
        return {file.name: file_digest(file) for file in self.files}

    def finalize(self) -> None:
        for finalizer in self.finalizers:
            finalizer()


def stage(request: Any, buffers: CopyBuffers) -> StagedWrites:
    """Begin to copy what `dist_checkpointing.save(..., async_sharded_save=True)` says is to be written."""
    if request.async_fn is None:
        return StagedWrites(lambda: None, [], request.finalize_fns, buffers.copies([]))
    rank, buckets, results = request.async_fn_args  # megatron-core would pin the tensors one by one
    files = [Path(file) for file, *_ in buckets]
    tensors = [tensor for _, _, (_, parts) in buckets for _, tensor in parts]
    copies = buffers.copies(tensors)
    taken = map(copies.take, range(len(tensors)))
    contents = [
        (file, key, (objects, zip([item for item, _ in parts], taken, strict=False)))
        for file, key, (objects, parts) in buckets
    ]
    return StagedWrites(
        lambda: request.async_fn(rank, contents, results), files, request.finalize_fns, copies
    )


log = structlog.get_logger()
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


def stage_state(trainer: "Trainer", directory: Path, buffers: CopyBuffers) -> StagedWrites:
    """Begin to copy the state of `trainer` to the host. Every rank calls this."""
    install_in_process_writer()
    trainer.finish_gathering()
    request = dist_checkpointing.save(
        _sharded_state(trainer, trainer.frozen.own, is_loading=False),
        str(directory),
        async_sharded_save=True,
        content_metadata=dict(SHARDING),
    )
    return stage(request, buffers)


def saved_tensors(trainer: "Trainer") -> list[Tensor]:
    """Return the tensors that `stage_state` copies. Every rank calls this."""
    trainer.finish_gathering()
    state = _sharded_state(trainer, trainer.frozen.own, is_loading=False)
    sharded, _ = save_preprocess(state, validate_access_integrity=False)
    entries = [entry for entry in nested_values(sharded) if isinstance(entry, ShardedTensor)]
    return [entry.data for entry in entries if is_main_replica(entry.replica_id)]


def load_state(trainer: "Trainer", directory: Path, training: Mapping[str, Any]) -> None:
    """Restore `trainer` to what it was. Every rank calls this. Raises `StorageError` if it cannot be read."""
    trainer.settle_parameters()
    wanted = _sharded_state(trainer, training.get("policies", []), is_loading=True)
    if not training.get("head"):
        wanted.pop("head", None)  # the head stays as it came with the model
    if training["ranks"] != dist.get_world_size():  # whose would the states be?
        del wanted["rng"]
    try:
        state = dist_checkpointing.load(wanted, str(directory))
    except (CheckpointingException, CheckpointException, RuntimeError, OSError) as error:
        raise StorageError(f"cannot read checkpoint {directory}: {error}") from error
    _load_model(trainer, state)
    if trainer.critic is not None:
        _load_model(trainer.critic, state["critic"])
        trainer.critic.updates_done = training["critic"]["updates_done"]
    elif training.get("critic"):
        log.warning("critic_left_behind", checkpoint=str(directory), why="the objective has none")
    _load_head(trainer.head, state.get("head"), directory, saved=bool(training.get("head")))
    for tag, weights in state["policies"].items():
        trainer.frozen.restore(tag, list(weights.values()))
    trainer.counts.restore(training)
    if "rng" in state:
        _set_rng_state(state["rng"])


def _load_head(
    head: "TrainedHead | None", state: Mapping[str, Any] | None, directory: Path, *, saved: bool
) -> None:
    if head is not None and state is not None:
        _load_model(head, state)
    elif head is not None:
        begins = "as it came with the model"
        log.info("next_token_head_not_in_checkpoint", checkpoint=str(directory), begins=begins)
    elif saved:
        log.warning("next_token_head_left_behind", checkpoint=str(directory), why="learner.mtp.weight is 0")


def _load_model(model: "Trainer | MegatronCritic | TrainedHead", state: Mapping[str, Any]) -> None:
    for name, chunk in _chunks(model).items():
        chunk.load_state_dict(state[name], strict=not _has_adapters(model))  # else without frozen weights
    load_optimizer_state(model.optimizer, state["optimizer"])


def training_state(trainer: "Trainer") -> dict[str, JsonValue]:
    return {
        **trainer.counts.saved(),
        "ranks": dist.get_world_size(),
        "optimizer": trainer.optimizer_config.matrices,
        "distributed_optimizer": trainer.parallel.distributed_optimizer,
        "frozen": [*sorted(trainer.frozen_names)],
        "lora": None if trainer.lora is None else trainer.lora.base.saved(),
        "policies": [*sorted(trainer.frozen.own)],
        "critic": _critic_state(trainer.critic) if trainer.critic else None,
        "head": None if trainer.head is None else _head_state(trainer.head),
    }


def _head_state(head: "TrainedHead") -> dict[str, JsonValue]:
    return {"stages": head.stages, "frozen": [*sorted(head.frozen_names)]}


def _critic_state(critic: "MegatronCritic") -> dict[str, JsonValue]:
    return {
        "model": fingerprint(critic.hf_config),
        "optimizer": critic.optimizer_type,
        "updates_done": critic.updates_done,
    }


def refuse_other_training(directory: Path, training: Mapping[str, Any], trainer: "Trainer") -> None:
    if (saved := training["distributed_optimizer"]) != trainer.parallel.distributed_optimizer:
        raise ConfigError(
            f"checkpoint {directory} was saved with learner.parallel.distributed_optimizer={saved}: "
            "set that again"
        )
    refuse_other_optimizer(directory, training.get("optimizer", "adamw"), trainer.optimizer_config.matrices)
    ours = None if trainer.lora is None else trainer.lora.base.saved()
    refuse_other_adapters(directory, training.get("lora"), ours)
    refuse_other_frozen(directory, training["frozen"], trainer.frozen_names)
    if trainer.head is not None and (saved_head := training.get("head")):
        refuse_other_frozen(directory, saved_head["frozen"], trainer.head.frozen_names)
        _refuse_more_stages(directory, saved_head["stages"], trainer.head.stages)
    if trainer.critic is not None:
        _refuse_other_critic(directory, training.get("critic"), trainer.critic)


def _refuse_more_stages(directory: Path, saved: int, stages: int) -> None:
    if stages > saved:
        raise ConfigError(
            f"checkpoint {directory} was saved with learner.parallel.pipeline={saved} and a head for the "
            f"token after the next, whose optimizer more stages cannot resume: set pipeline to {saved} or "
            "less, or start a new run from its weights with --model.path"
        )


def _refuse_other_critic(directory: Path, saved: Mapping[str, Any] | None, critic: "MegatronCritic") -> None:
    if saved is None:
        raise ConfigError(
            f"checkpoint {directory} has no critic, and the objective wants one: set learner.advantage.type "
            "and learner.critic.train as they were, or start a new run from its weights with --model.path"
        )
    if other := differences_from(saved["model"], critic.hf_config):
        raise ConfigError(
            f"checkpoint {directory} has another critic: {', '.join(other)}; keep learner.critic.path"
        )
    refuse_other_optimizer(
        directory, saved.get("optimizer", "adamw"), critic.optimizer_type, "learner.critic.optimizer"
    )


def _sharded_state(trainer: "Trainer", policies: Iterable[str], *, is_loading: bool) -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {**SHARDING, "dp_cp_group": group}
    state = _sharded_model(trainer, trainer.optimizer, metadata, is_loading=is_loading)
    frozen = {tag: _sharded_policy(trainer, tag, metadata) for tag in sorted(policies)}
    state |= {"rng": _sharded_rng_state(), "policies": frozen}
    if trainer.head is not None:
        head = _sharded_model(trainer.head, trainer.head.optimizer, metadata, is_loading=is_loading)
        add_prefix_for_sharding(head, HEAD)
        state["head"] = head
    if trainer.critic is not None:
        critic = _sharded_model(trainer.critic, trainer.critic.optimizer, metadata, is_loading=is_loading)
        add_prefix_for_sharding(critic, "critic.")  # the policy's weights have the same names
        state["critic"] = critic
    return state


def _sharded_model(
    model: "Trainer | MegatronCritic | TrainedHead", optimizer: MegatronOptimizer, metadata: dict[str, Any],
    *, is_loading: bool,
) -> dict[str, Any]:  # fmt: skip
    chunks = {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in _chunks(model).items()}
    if _has_adapters(model):
        chunks = {
            name: {key: entry for key, entry in chunk.items() if is_trained_with_adapters(key)}
            for name, chunk in chunks.items()
        }
    with torch.no_grad():
        state = optimizer.sharded_state_dict(
            chunks if len(chunks) > 1 else chunks["model"], is_loading=is_loading, metadata=dict(SHARDING)
        )
    return {**chunks, "optimizer": state}


def _sharded_policy(trainer: "Trainer", tag: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
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


def _has_adapters(model: "Trainer | MegatronCritic | TrainedHead") -> bool:
    return getattr(model, "lora", None) is not None


def _chunks(model: "Trainer | MegatronCritic | TrainedHead") -> dict[str, MegatronModule]:
    if len(model.chunks) == 1:
        return {"model": model.chunks[0]}
    return {f"model{number}": chunk for number, chunk in enumerate(model.chunks)}


def _sharded_rng_state() -> ShardedObject:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return ShardedObject("rng", states, (dist.get_world_size(),), (dist.get_rank(),))


def _set_rng_state(states: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
