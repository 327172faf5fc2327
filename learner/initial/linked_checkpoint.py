"""A checkpoint of another run as the model directory that a run begins with.

Adapters go on where the run trains the same ones on the same backend: the directory is then that of their
frozen weights, with the checkpoint in it. Else they are merged into these weights."""

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import PretrainedConfig

from bus.errors import ConfigError
from learner.backends.fsdp.fingerprint import fingerprint
from learner.backends.model_loading import load_hf_directory, merged_model
from learner.config.lora import LoraConfig
from learner.initial.initial import refuse_reward_model
from learner.model_directories.checkpoint_manifest import (
    ADAPTERS,
    MANIFEST,
    adapters_go_on,
    adapters_in,
    damaged_files,
    differences,
    read_manifest,
    refuse_damage,
    refuse_other_model,
)
from learner.model_directories.lazy_weights import main_dtype
from learner.model_directories.model_directory import copy_tokenizer, load_hf_config, save_hf_directory
from storage.disk.atomic_files import publish, temporary_sibling
from storage.disk.file_errors import naming


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """A checkpoint of another run, and what the run that begins with it trains."""

    checkpoint: Path
    base: Path
    """Directory of the weights that the other run began with."""
    backend: str
    lora: LoraConfig
    with_optimizer: bool
    gives_scores: bool
    """Whether the run trains a reward model."""

    @property
    def adapters_go_on(self) -> bool:
        """Return whether the run goes on with the adapters of the checkpoint."""
        return adapters_go_on(self.checkpoint, self.backend, self.lora, gives_scores=self.gives_scores)


def refuse_unfit_checkpoint(begin: Beginning, hf_config: PretrainedConfig) -> None:
    """Raise `ConfigError` for a checkpoint of another model than `hf_config` describes, and for a reward
    model or adapters that do not go on as the settings want; `StorageError` for one that is not whole."""
    checkpoint, manifest = begin.checkpoint, read_manifest(begin.checkpoint)
    theirs = load_hf_config(checkpoint)
    refuse_other_model(checkpoint, differences(fingerprint(theirs), fingerprint(hf_config)))
    if not begin.gives_scores:
        refuse_reward_model(checkpoint, theirs, checkpoint.parents[1] / "export")
    if not adapters_in(manifest).exists:
        load_hf_directory(checkpoint)
    elif begin.with_optimizer and not begin.adapters_go_on:
        raise ConfigError(
            f"model.from_optimizer=true: the adapters of {checkpoint} would be merged, and their optimizer "
            "has nothing to update: set learner.lora and learner.backend as they were, or leave it out"
        )


def link_checkpoint(begin: Beginning, described: Path, target: Path, notes: Mapping[str, str]) -> None:
    """Make the model directory `target` of a checkpoint, the tokenizer of `described` and texts by the names
    of their files.

    Files are shared with those of the other run where the file system can, and stay when that run removes its
    own. Raises as `refuse_unfit_checkpoint` does, and `LostDataError` for a damaged checkpoint."""
    checkpoint, manifest = begin.checkpoint, read_manifest(begin.checkpoint)
    refuse_unfit_checkpoint(begin, load_hf_config(described))
    refuse_damage(checkpoint, damaged_files(checkpoint, manifest, manifest["files"]))
    temporary, lora = temporary_sibling(target), adapters_in(manifest)
    files = [checkpoint / name for name in (MANIFEST, *manifest["files"])]
    with naming(target):
        shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed here
        temporary.mkdir()
        copy_tokenizer(described, temporary)
        for name, text in notes.items():
            (temporary / name).write_text(text)
        if not lora.exists:
            _link(files, temporary)
        elif begin.adapters_go_on:
            _link([file for file in begin.base.iterdir() if file.is_file()], temporary)
            _link(files, temporary / ADAPTERS)
        else:
            hf_config, weights = merged_model(checkpoint, begin.base, lora)
            hf_config.dtype = main_dtype(map(weights.spec, weights))
            save_hf_directory(temporary, hf_config, weights, None)
        publish(temporary, target)


def _link(files: Iterable[Path], directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    for file in files:
        target = directory / file.name
        if target.exists():
            continue
        try:
            target.hardlink_to(file.resolve())
        except OSError:  # another file system, or one without links
            shutil.copyfile(file, target)
