"""A checkpoint of another run as the model directory that a run begins with."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from transformers import PretrainedConfig

from learner.backends.fsdp.fingerprint import fingerprint
from learner.backends.model_loading import load_hf_directory
from learner.model_directories.checkpoint_manifest import (
    MANIFEST,
    damaged_files,
    differences,
    read_manifest,
    refuse_damage,
    refuse_other_model,
)
from learner.model_directories.model_directory import copy_tokenizer, load_hf_config
from storage.disk.atomic_files import publish, temporary_sibling
from storage.disk.file_errors import naming


def refuse_unfit_checkpoint(checkpoint: Path, hf_config: PretrainedConfig) -> None:
    """Raise `ConfigError` for a checkpoint of another model than `hf_config` describes, or without weights of
    its own, and `StorageError` for one that is not whole."""
    theirs, _ = load_hf_directory(checkpoint)
    refuse_other_model(checkpoint, differences(fingerprint(theirs), fingerprint(hf_config)))


def link_checkpoint(checkpoint: Path, described: Path, target: Path, notes: Mapping[str, str]) -> None:
    """Make the model directory `target` of the files of a checkpoint, the tokenizer of `described` and texts
    by the names of their files.

    The files are shared with the checkpoint where the file system can, and stay when that run removes its
    own. Raises as `refuse_unfit_checkpoint` does, and `LostDataError` for a damaged checkpoint."""
    manifest = read_manifest(checkpoint)
    refuse_unfit_checkpoint(checkpoint, load_hf_config(described))
    refuse_damage(checkpoint, damaged_files(checkpoint, manifest, manifest["files"]))
    temporary = temporary_sibling(target)
    with naming(target):
        shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed here
        temporary.mkdir()
        for name in [MANIFEST, *manifest["files"]]:
            _link(checkpoint / name, temporary / name)
        copy_tokenizer(described, temporary)
        for name, text in notes.items():
            (temporary / name).write_text(text)
        publish(temporary, target)


def _link(file: Path, target: Path) -> None:
    try:
        target.hardlink_to(file)
    except OSError:  # another file system, or one without links
        shutil.copyfile(file, target)
