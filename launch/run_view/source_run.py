"""Another run whose checkpoint a run begins with (`model.from_run`), and what is taken of its model."""

from pathlib import Path
from typing import Any

from bus.errors import ConfigError
from launch.model_files.hub_revision import pinned
from launch.model_files.model_directory import model_of_run
from launch.run_view.recorded_runs import find_run
from launch.run_view.run_files import Origin, RunFiles, recorded_config
from launch.settings.run_config import RunConfig
from learner.model_directories.checkpoint_manifest import (
    MANIFEST,
    adapters_beside,
    adapters_go_on,
    adapters_in,
    read_manifest,
    written_by,
)
from storage.disk import checkpoints
from storage.disk.run_directory import RunDirectory, is_run


def newest_checkpoint(source: Path) -> Path:
    """Return the checkpoint that a path names, itself or the newest of several. Raises `ConfigError`."""
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
    return written_by(read_manifest(checkpoint)) == "fsdp"


def chosen_checkpoint(directory: Path, from_run: str) -> tuple[Path, Origin]:
    """Return the checkpoint that RUN or RUN@STEP names, in a directory of runs. Raises `ConfigError` for an
    unknown run or step, and `StorageError` for a checkpoint that is not whole."""
    name, _, asked = from_run.partition("@")
    path = find_run(directory, name)
    files = RunFiles(path)
    there, newest = files.saved_steps, checkpoints.latest(path / "checkpoints")
    if newest is None:
        raise ConfigError(f"run {name!r} has no checkpoint in {path} yet: nothing can begin with its weights")
    step = int(asked) if asked else max(there, default=0)
    if asked and step not in there:
        raise ConfigError(
            f"run {name!r} has no checkpoint of step {step}: there are "
            f"{', '.join(map(str, there)) or 'none'}; learner.checkpoint.keep says how many a run keeps"
        )
    found = files.checkpoint(step) if there else newest
    warmup_step = int(str(read_manifest(found)["extra"].get("warmup_step", 0)))
    return found, Origin(run=name, step=step, warmup_step=warmup_step)


def model_settings(directory: Path, run: str, from_run: str) -> dict[str, Any]:
    """Return the settings of the model that a run takes over from the one that it begins with. A run that has
    begun keeps those that it had, since the other may be gone. Raises as `chosen_checkpoint` does."""
    source = RunDirectory(directory, run)
    if RunFiles(directory / run).origin is None:
        chosen_checkpoint(directory, from_run)
        source = RunDirectory(directory, from_run.partition("@")[0])
    model = recorded_config(source).model
    path = None if model.path is None else pinned(model.path, source)
    taken = model.model_copy(update={"path": path})
    return taken.model_dump(mode="json", exclude={"from_run", "from_optimizer"})


def told_beginning(config: RunConfig) -> str:
    """Say with what of which other run a run begins; nothing where it begins with its own first weights."""
    if (source := config.model.from_run) is None:
        return ""
    run = config.directory / config.run
    begun, learner = RunFiles(run).origin is not None, config.learner
    go_on, merged = adapters_beside(run / "model") is not None, ""
    if not begun:
        found, gives_scores = chosen_checkpoint(config.directory, source)[0], config.warmup.makes_reward_model
        go_on = adapters_go_on(found, learner.backend, learner.lora, gives_scores=gives_scores)
        merged = ", its adapters merged into them" if adapters_in(read_manifest(found)).exists else ""
    if go_on:
        return f"Run {config.run!r} begins with the adapters of run {source}, which are trained further."
    return f"Run {config.run!r} begins with the weights of run {source}{merged}."


def source_model(directory: Path, origin: Origin) -> Path:
    """Return the directory with the tokenizer of the model of a run that another begins with."""
    source = RunDirectory(directory, origin.run)
    return model_of_run(recorded_config(source), source)


def refuse_other_origin(config: RunConfig, run: RunDirectory) -> None:
    """Raise `ConfigError` for a run that has begun with other weights than those of `model.from_run`."""
    if not run.exists:
        return
    files, asked = RunFiles(run.path), config.model.from_run
    begun = files.origin
    if begun is not None and asked is None:
        raise ConfigError(
            f"run {run.name!r} has begun with the weights of {begun}: give --from {begun.run} again, or "
            "choose another --run"
        )
    if begun is not None and asked not in (begun.run, f"{begun.run}@{begun.step}"):
        raise ConfigError(
            f"run {run.name!r} has begun with the weights of {begun}, not of {asked}: choose another --run "
            "for those"
        )
    if begun is None and asked is not None and ((run.path / "model").exists() or files.saved_steps):
        raise ConfigError(
            f"run {run.name!r} has begun with other weights than those of {asked}: choose another --run for "
            "those, or leave --from out"
        )
