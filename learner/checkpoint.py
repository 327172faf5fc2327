"""The trainer's state in checkpoint directories (storage/checkpoints.py).

Each holds megatron-core's sharded files (`torch_dist`), the model's `config.json` and a manifest
(learner/manifest.py) with where the schedule stands and what the caller wants kept with them.
"""

import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import JsonValue
from torch.distributed.checkpoint.api import CheckpointException

from bus.errors import ConfigError, StorageError
from learner.checkpoint_writer import install_in_process_writer
from learner.manifest import read_manifest, refuse_other_model, write_manifest
from learner.megatron import CheckpointingException, dist_checkpointing, parallel_state
from learner.optimizer import load_optimizer_state
from learner.trainer import Trainer
from storage import checkpoints
from storage.files import TEMPORARY_PREFIX

SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}
"""How megatron-core lays out the optimizer: this way another number of ranks can load it."""


def save_checkpoint(
    trainer: Trainer, root: Path, step: int, extra: Mapping[str, JsonValue], *, keep: int
) -> None:
    """Write everything `load_checkpoint` needs; on return it survives a power cut. Every rank calls this.

    Replaces a checkpoint of the same step, and leaves the `keep` newest.
    """
    install_in_process_writer()
    if dist.get_rank() == 0:
        checkpoints.remove_leftovers(root)
        checkpoints.temporary(root, step)
    dist.barrier()
    temporary = checkpoints.temporary(root, step)
    with _megatron_deprecations_silenced():
        dist_checkpointing.save(
            _sharded_state(trainer, is_loading=False), str(temporary), content_metadata=dict(SHARDING)
        )
    if dist.get_rank() == 0:
        trainer.hf_config.save_pretrained(temporary)
        training = {"steps_done": trainer.steps_done, "updates_done": trainer.updates_done}
        write_manifest(temporary, trainer.hf_config, training=training, extra=extra, digests={})
        _publish(temporary, checkpoints.directory(root, step))
        checkpoints.prune(root, keep)
    dist.barrier()


def load_checkpoint(trainer: Trainer, directory: Path) -> dict[str, JsonValue]:
    """Restore `trainer` to what it was, and return what was saved as `extra`. Every rank calls this.

    Raises `StorageError` for a checkpoint that is missing or damaged, `ConfigError` for another model's.
    """
    manifest = read_manifest(directory)
    refuse_other_model(directory, manifest, trainer.hf_config)
    training = manifest["training"]
    if training is None:
        raise ConfigError(f"{directory} holds weights only: training starts from it with --model.path")
    try:
        with _megatron_deprecations_silenced():
            state = dist_checkpointing.load(_sharded_state(trainer, is_loading=True), str(directory))
    except (CheckpointingException, CheckpointException, RuntimeError, OSError) as error:
        raise StorageError(f"cannot read checkpoint {directory}: {error}") from error
    trainer.model.load_state_dict(state["model"])
    load_optimizer_state(trainer.optimizer, state["optimizer"])
    trainer.steps_done, trainer.updates_done = training["steps_done"], training["updates_done"]
    torch.set_rng_state(state["rng"])
    return dict(manifest["extra"])


def latest_checkpoint(root: Path) -> Path | None:
    """Return the checkpoint of the highest step, if there is one."""
    return checkpoints.latest(root)


def read_extra(directory: Path) -> dict[str, JsonValue]:
    """Return what was saved as `extra`, before there is a trainer to load. Raises `StorageError`."""
    return dict(read_manifest(directory)["extra"])


@contextmanager
def _megatron_deprecations_silenced() -> Iterator[None]:
    """Silence torch on parts of its API that megatron-core still uses."""
    with warnings.catch_warnings():
        for message in ("`load_state_dict` is deprecated", "Please use DTensor instead"):
            warnings.filterwarnings("ignore", message=message)
        yield


def _sharded_state(trainer: Trainer, *, is_loading: bool) -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    model = trainer.model.sharded_state_dict(metadata={**SHARDING, "dp_cp_group": group})
    with torch.no_grad():
        optimizer = trainer.optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=dict(SHARDING)
        )
    return {"model": model, "optimizer": optimizer, "rng": torch.get_rng_state()}


def _publish(temporary: Path, final: Path) -> None:
    replaced = final.with_name(f"{TEMPORARY_PREFIX}replaced-{final.name}")
    if final.exists():
        final.rename(replaced)
    checkpoints.publish(temporary, final)
    shutil.rmtree(replaced, ignore_errors=True)
