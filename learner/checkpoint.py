"""The trainer's state in checkpoint directories (storage/checkpoints.py).

Each holds megatron-core's sharded files (`torch_dist`) and `manifest.json`: which model, where the schedule
stands, the sizes of the other files, and what the caller wants kept with them.
"""

import json
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
from transformers import PretrainedConfig

from bus.errors import ConfigError, StorageError
from learner.checkpoint_writer import install_in_process_writer
from learner.conversion.families import shape_of
from learner.megatron import CheckpointingException, dist_checkpointing, parallel_state
from learner.model import PolicyModel, rope_theta
from learner.optimizer import load_optimizer_state
from learner.trainer import Trainer
from storage import checkpoints
from storage.files import TEMPORARY_PREFIX

MANIFEST = "manifest.json"
FORMAT = 1
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
    trainer.settle_parameters()
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
        _write_manifest(temporary, trainer, extra)
        _publish(temporary, checkpoints.directory(root, step))
        checkpoints.prune(root, keep)
    dist.barrier()


def load_checkpoint(trainer: Trainer, directory: Path) -> dict[str, JsonValue]:
    """Restore `trainer` to what it was, and return what was saved as `extra`. Every rank calls this.

    Raises `StorageError` for a checkpoint that is missing or damaged, `ConfigError` for another model's.
    """
    manifest = _read_manifest(directory)
    _refuse_other_model(directory, manifest["model"], _fingerprint(trainer.hf_config))
    if (saved := manifest["distributed_optimizer"]) != trainer.parallel.distributed_optimizer:
        raise ConfigError(
            f"checkpoint {directory} was saved with learner.parallel.distributed_optimizer={saved}: "
            "set that again"
        )
    try:
        with _megatron_deprecations_silenced():
            state = dist_checkpointing.load(_sharded_state(trainer, is_loading=True), str(directory))
    except (CheckpointingException, CheckpointException, RuntimeError, OSError) as error:
        raise StorageError(f"cannot read checkpoint {directory}: {error}") from error
    for name, chunk in _chunks(trainer).items():
        chunk.load_state_dict(state[name])
    load_optimizer_state(trainer.optimizer, state["optimizer"])
    trainer.steps_done, trainer.updates_done = manifest["steps_done"], manifest["updates_done"]
    torch.set_rng_state(state["rng"])
    return dict(manifest["extra"])


def latest_checkpoint(root: Path) -> Path | None:
    """Return the checkpoint of the highest step, if there is one."""
    return checkpoints.latest(root)


def read_extra(directory: Path) -> dict[str, JsonValue]:
    """Return what was saved as `extra`, before there is a trainer to load. Raises `StorageError`."""
    return dict(_read_manifest(directory)["extra"])


@contextmanager
def _megatron_deprecations_silenced() -> Iterator[None]:
    """Silence torch on parts of its API that megatron-core still uses."""
    with warnings.catch_warnings():
        for message in ("`load_state_dict` is deprecated", "Please use DTensor instead"):
            warnings.filterwarnings("ignore", message=message)
        yield


def _sharded_state(trainer: Trainer, *, is_loading: bool) -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    chunks = {
        name: chunk.sharded_state_dict(metadata={**SHARDING, "dp_cp_group": group})
        for name, chunk in _chunks(trainer).items()
    }
    with torch.no_grad():
        optimizer = trainer.optimizer.sharded_state_dict(
            chunks if len(chunks) > 1 else chunks["model"], is_loading=is_loading, metadata=dict(SHARDING)
        )
    return {**chunks, "optimizer": optimizer, "rng": torch.get_rng_state()}


def _chunks(trainer: Trainer) -> dict[str, PolicyModel]:
    """The pieces of the model by the names that megatron-core's optimizer expects."""
    if len(trainer.chunks) == 1:
        return {"model": trainer.chunks[0]}
    return {f"model{number}": chunk for number, chunk in enumerate(trainer.chunks)}


def _write_manifest(directory: Path, trainer: Trainer, extra: Mapping[str, JsonValue]) -> None:
    manifest = {
        "format": FORMAT,
        "model": _fingerprint(trainer.hf_config),
        "distributed_optimizer": trainer.parallel.distributed_optimizer,
        "steps_done": trainer.steps_done,
        "updates_done": trainer.updates_done,
        "extra": dict(extra),
        "files": {path.name: path.stat().st_size for path in directory.iterdir()},
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1))


def _publish(temporary: Path, final: Path) -> None:
    replaced = final.with_name(f"{TEMPORARY_PREFIX}replaced-{final.name}")
    if final.exists():
        final.rename(replaced)
    checkpoints.publish(temporary, final)
    shutil.rmtree(replaced, ignore_errors=True)


def _fingerprint(hf_config: PretrainedConfig) -> dict[str, JsonValue]:
    shape = vars(shape_of(hf_config)).copy()
    experts = shape.pop("experts")
    routing = {} if experts is None else {f"experts_{key}": value for key, value in vars(experts).items()}
    found = {"model_type": hf_config.model_type, "rope_theta": rope_theta(hf_config), **shape, **routing}
    return dict(json.loads(json.dumps(found)))  # as it will be read: a tuple becomes a list


def _refuse_other_model(directory: Path, found: dict[str, JsonValue], expected: dict[str, JsonValue]) -> None:
    different = [
        f"{key} is {found.get(key)}, not {value}"
        for key, value in expected.items()
        if found.get(key) != value
    ]
    if different:
        raise ConfigError(f"checkpoint {directory} is of another model: {', '.join(different)}")


def _read_manifest(directory: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((directory / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise StorageError(f"{directory} is not a whole checkpoint: {error}") from error
    if manifest.get("format") != FORMAT:
        raise StorageError(
            f"checkpoint {directory} has format {manifest.get('format')}, this build reads {FORMAT}"
        )
    manifest.setdefault("distributed_optimizer", True)
    for name, size in manifest["files"].items():
        file = directory / name
        if not file.is_file() or file.stat().st_size != size:
            raise StorageError(f"checkpoint {directory} is torn: {name} is missing or not {size} bytes long")
    return manifest
