"""Checkpoints of runs as models: which one a path means, and where its tokenizer lies."""

from pathlib import Path

from bus.errors import ConfigError
from launch.model_files.model_directory import model_of_run
from launch.run_view.run_files import recorded_config
from storage.disk.run_directory import RunDirectory, is_run


def newest_checkpoint(source: Path) -> Path:
    """Return the checkpoint that a path names, itself or the newest of several. Raises `ConfigError`."""
    from learner.model_directories.checkpoint_manifest import MANIFEST
    from storage.disk import checkpoints

    source = source.absolute()
    for place in (source, source / "checkpoints"):
        if (place / MANIFEST).is_file():
            return place
        if (latest := checkpoints.latest(place)) is not None:
            return latest
    raise ConfigError(f"{source} is no checkpoint, and neither a directory of several nor that of a run")


def described_by(checkpoint: Path) -> Path | None:
    """Return the directory with the configuration and tokenizer of a checkpoint: its own, or its run's model;
    None where neither has a tokenizer."""
    from learner.model_directories.model_directory import has_tokenizer

    places, root = [checkpoint], checkpoint.parent.parent
    if checkpoint.parent.name == "checkpoints" and is_run(root):
        run = RunDirectory(root.parent, root.name)
        places += [root / "export", model_of_run(recorded_config(run), run)]
    return next(filter(has_tokenizer, places), None)


def is_of_fsdp(checkpoint: Path) -> bool:
    """Return whether the backend `fsdp` wrote a checkpoint."""
    from learner.model_directories.checkpoint_manifest import read_manifest, written_by

    return written_by(read_manifest(checkpoint)) == "fsdp"
