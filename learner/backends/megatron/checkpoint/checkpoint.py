"""The trainer's state in checkpoint directories (storage/disk/checkpoints.py).

Each holds megatron-core's sharded files (`torch_dist`), the model's `config.json` and a manifest
(learner/backends/megatron/checkpoint/manifest.py) with where the schedule stands and what the caller wants
kept with them.
"""

import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import JsonValue
from torch.distributed.checkpoint.api import CheckpointException

from bus.errors import ConfigError, StorageError
from learner.backends.megatron.checkpoint.manifest import (
    damaged_files,
    read_manifest,
    refuse_damage,
    refuse_other_model,
    write_manifest,
)
from learner.backends.megatron.checkpoint.writer import CopyRoom, Staged, install_in_process_writer, stage
from learner.backends.megatron.core import (
    CheckpointingException,
    ShardedObject,
    dist_checkpointing,
    parallel_state,
)
from learner.backends.megatron.model.model import PolicyModel
from learner.backends.megatron.optimizer.optimizer import load_optimizer_state
from learner.backends.megatron.process_groups import gathered
from learner.backends.megatron.trainer import Trainer
from storage.disk import checkpoints
from storage.disk.atomic_files import TEMPORARY_PREFIX

SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
    "non_homogeneous_layers": True,
}
"""How megatron-core lays out the state: this way another number of ranks can load it."""
WRITING_TIMEOUT_S = 3600.0
"""A rank that has not written its files by then has failed."""

# What megatron-core still uses of torch. For good: filters belong to the process, not to a thread.
for _message in ("`load_state_dict` is deprecated", "Please use DTensor instead"):
    warnings.filterwarnings("ignore", message=_message)


class PendingCheckpoint:
    """A checkpoint whose files are being written while training goes on; nobody sees it before `finish`."""

    def __init__(self, staged: Staged, publish: Callable[[Mapping[str, str]], None], final: Path) -> None:
        """Begin to write on a thread. `start_checkpoint` makes one of these."""
        self.finished = False
        self._staged = staged
        self._publish = publish
        self._final = final
        thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing = thread.submit(staged.write)
        thread.shutdown(wait=False)

    @property
    def written(self) -> bool:
        """Whether this rank's files are on disk, so that `finish` need not wait for them."""
        return self._writing.done()

    def finish(self) -> None:
        """Wait for the files of all ranks, and give the checkpoint its name; then it survives a power cut.

        Every rank calls this, at the same point between its other collectives. Once is enough. Raises
        `StorageError` on all of them when any could not write.
        """
        if self.finished:
            return
        self.finished = True
        # Every rank learns of a failure here: one that raised alone would leave the others waiting.
        failures = [failure for failure in gathered(self._failure()) if failure]
        if failures:
            raise StorageError(f"cannot write checkpoint {self._final}: {'; '.join(failures)}")
        self._staged.finalize()
        digests = {name: digest for part in gathered(self._writing.result()) for name, digest in part.items()}
        if dist.get_rank() == 0:
            self._publish(digests)
        dist.barrier()  # nobody prunes or commits before the checkpoint has its name

    def _failure(self) -> str:
        """What went wrong on this rank, or nothing."""
        try:
            error = self._writing.exception(WRITING_TIMEOUT_S)
        except TimeoutError:
            return f"rank {dist.get_rank()} is not done after {WRITING_TIMEOUT_S:.0f} s"
        return f"rank {dist.get_rank()}: {error}" if error else ""


def start_checkpoint(
    trainer: Trainer,
    root: Path,
    step: int,
    extra: Mapping[str, JsonValue],
    *,
    keep: int,
    after: PendingCheckpoint | None = None,
    room: CopyRoom | None = None,
) -> PendingCheckpoint:
    """Copy everything `load_checkpoint` needs, and begin to write it. Every rank calls this.

    There is one such checkpoint at a time: `after`, the one before, is finished first.

    Args:
        trainer: may train on as soon as this returns.
        root: directory of the checkpoints.
        step: names the checkpoint; one of the same step is replaced.
        extra: kept with it; that of rank 0 counts.
        keep: how many of the newest checkpoints remain.
        after: the checkpoint before, if it may be unfinished.
        room: main memory for the copies of what is on a GPU, which stays for the next checkpoint; of `after`,
            and of no other that may be unfinished. Without it the copies go when they are written.
    """
    if after is not None:
        after.finish()
    install_in_process_writer()
    trainer.settle_parameters()
    if dist.get_rank() == 0:
        checkpoints.remove_leftovers(root)
        checkpoints.temporary(root, step)
    dist.barrier()  # the directory exists before any rank writes into it
    temporary, final = checkpoints.temporary(root, step), checkpoints.directory(root, step)
    request = dist_checkpointing.save(
        _sharded_state(trainer, trainer.frozen.own, is_loading=False),
        str(temporary),
        async_sharded_save=True,
        content_metadata=dict(SHARDING),
    )
    training = _training(trainer)

    def publish(digests: Mapping[str, str]) -> None:
        trainer.hf_config.save_pretrained(temporary)
        write_manifest(temporary, trainer.hf_config, training=training, extra=extra, digests=digests)
        _replace(temporary, final)
        checkpoints.prune(root, keep)

    return PendingCheckpoint(stage(request, room or CopyRoom()), publish, final)


def save_checkpoint(
    trainer: Trainer, root: Path, step: int, extra: Mapping[str, JsonValue], *,
    keep: int, room: CopyRoom | None = None,
) -> None:  # fmt: skip
    """Write a checkpoint; on return it survives a power cut. Every rank calls this."""
    start_checkpoint(trainer, root, step, extra, keep=keep, room=room).finish()


def load_checkpoint(trainer: Trainer, directory: Path) -> dict[str, JsonValue]:
    """Restore `trainer` to what it was, and return what was saved as `extra`. Every rank calls this.

    Another number of ranks, or another layout of them, may have saved it; then their random generators go
    on as they are. Raises `StorageError` for a checkpoint that is missing or damaged, `ConfigError` for one
    of another model, or with other weights frozen.
    """
    manifest = read_manifest(directory)
    refuse_other_model(directory, manifest, trainer.hf_config)
    training = _refuse_other_training(directory, manifest, trainer)
    _refuse_damage_on_any_rank(directory, manifest)
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
    if "rng" in state:
        _set_rng_state(state["rng"])
    return dict(manifest["extra"])


def latest_checkpoint(root: Path) -> Path | None:
    """Return the checkpoint of the highest step, if there is one."""
    return checkpoints.latest(root)


def read_extra(directory: Path) -> dict[str, JsonValue]:
    """Return what was saved as `extra`, before there is a trainer to load. Raises `StorageError`."""
    return dict(read_manifest(directory)["extra"])


def _sharded_state(trainer: Trainer, policies: Iterable[str], *, is_loading: bool) -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {**SHARDING, "dp_cp_group": group}
    chunks = {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in _chunks(trainer).items()}
    with torch.no_grad():
        optimizer = trainer.optimizer.sharded_state_dict(
            chunks if len(chunks) > 1 else chunks["model"], is_loading=is_loading, metadata=dict(SHARDING)
        )
    frozen = {tag: _sharded_policy(trainer, tag, metadata) for tag in sorted(policies)}
    return {**chunks, "optimizer": optimizer, "rng": _sharded_rng_state(), "policies": frozen}


def _sharded_policy(trainer: Trainer, tag: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of a frozen policy, cut and named as the model's own behind its tag."""
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


def _chunks(trainer: Trainer) -> dict[str, PolicyModel]:
    """The pieces of the model by the names that megatron-core's optimizer expects."""
    if len(trainer.chunks) == 1:
        return {"model": trainer.chunks[0]}
    return {f"model{number}": chunk for number, chunk in enumerate(trainer.chunks)}


def _sharded_rng_state() -> ShardedObject:
    """The states of this rank's random generators, one of as many as there are ranks."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return ShardedObject("rng", states, (dist.get_world_size(),), (dist.get_rank(),))


def _set_rng_state(states: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _training(trainer: Trainer) -> dict[str, Any]:
    """Where the trainer stands, and what of it must be the same to go on from there."""
    return {
        "steps_done": trainer.steps_done,
        "updates_done": trainer.updates_done,
        "ranks": dist.get_world_size(),
        "distributed_optimizer": trainer.parallel.distributed_optimizer,
        "frozen": sorted(trainer.trainable.frozen(trainer.hf_config)),
        "policies": sorted(trainer.frozen.own),
    }


def _refuse_other_training(directory: Path, manifest: Mapping[str, Any], trainer: Trainer) -> dict[str, Any]:
    training: dict[str, Any] | None = manifest["training"]
    if training is None:
        raise ConfigError(f"{directory} holds weights only: training starts from it with --model.path")
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
    return training


def _refuse_damage_on_any_rank(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Raise on every rank when a file is damaged. Each rank reads its share of the files."""
    share = sorted(manifest["files"])[dist.get_rank() :: dist.get_world_size()]
    damaged = gathered(damaged_files(directory, manifest, share))
    refuse_damage(directory, [name for names in damaged for name in names])


def _replace(temporary: Path, final: Path) -> None:
    replaced = final.with_name(f"{TEMPORARY_PREFIX}replaced-{final.name}")
    if final.exists():
        final.rename(replaced)
    checkpoints.publish(temporary, final)
    shutil.rmtree(replaced, ignore_errors=True)
