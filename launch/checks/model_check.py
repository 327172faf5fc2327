"""Asks whether the learner would train a run's models, in a process that ends with the answer. It is the
learner's own code that is asked, which loads torch: the process that supervises a run keeps none of it, and a
model of any size or kind ends the question at most."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bus.errors import ConfigError
from bus.process.called_apart import NoAnswerError, answered_apart
from launch.checks.model_remarks import model_remarks, transport_remark
from launch.model_files.hub_revision import pinned
from launch.model_files.model_directory import model_on_disk
from launch.run_view.run_files import RunFiles
from launch.run_view.source_run import chosen_checkpoint
from launch.settings.run_config import RunConfig
from learner.config.parallel import UNDIVIDED
from storage.disk.run_directory import RunDirectory

LIMIT_S = 300.0
"""Longest time of the question, which takes seconds: of the largest models a minute."""


async def refuse_models(configs: Sequence[RunConfig]) -> list[str]:
    """Return what `model_remarks` says; `configs` are those of the run's policies. Raises `ConfigError` as it
    does, and for the first model that the learner would refuse. A model on another host is not seen from
    here: the learner refuses it when it loads it."""
    seen = [here for config in configs if (here := _with_model_here(config)) is not None]
    if not seen:
        return []
    model = f"model.path={seen[0].model.path}"
    try:
        return await answered_apart(_remarks_unless_refused, seen, limit_s=LIMIT_S)
    except TimeoutError as error:
        raise ConfigError(
            f"{model}: the process that looks whether the learner trains this model did not end within "
            f"{LIMIT_S:g} s, where the largest take a minute: start again when this host is less busy"
        ) from error
    except NoAnswerError as error:
        raise ConfigError(
            f"{model}: the process that looked at this model ended with {error}: look whether this host has "
            "memory left, and whether the files of the model are whole"
        ) from error


def _remarks_unless_refused(configs: Sequence[RunConfig]) -> list[str]:
    for config in configs:
        transport_remark(config)  # before the model is read: it may be too large
        refuse_model(config)
    return model_remarks(configs)


def _with_model_here(config: RunConfig) -> RunConfig | None:
    """Return the settings with the directory of the model; None where there is nothing to ask of it: it is on
    another host, or made here in a shape that nobody divides."""
    if config.model.path is None:
        divided = config.learner.parallel != UNDIVIDED or config.learner.lora.exists
        return config if divided or config.model.from_run is not None else None
    directory = model_on_disk(pinned(config.model.path, RunDirectory(config.directory, config.run)))
    if not (directory / "config.json").is_file():
        return None
    return config.model_copy(update={"model": config.model.model_copy(update={"path": directory.resolve()})})


def refuse_model(config: RunConfig) -> None:
    """Raise `ConfigError` for a model that the learner would refuse. Loads torch and the learner; a scratch
    model is made in a directory that is gone afterwards."""
    from launch.checks.memory_check import refuse_too_large
    from launch.services.first_weights import beginning
    from launch.services.learner import learner_settings
    from learner.initial.initial import prepare
    from learner.initial.linked_checkpoint import refuse_unfit_checkpoint
    from learner.initial.unfit_settings import refuse_before_start

    shown = config.warmup.demonstrations
    warmup = config.warmup if shown is not None else config.warmup.model_copy(update={"steps": 0})
    own = config.model_copy(
        update={"warmup": warmup, "model": config.model.model_copy(update={"from_run": None})}
    )
    with tempfile.TemporaryDirectory(prefix="sluice-model-") as scratch:
        run = RunDirectory(Path(scratch), config.run)
        settings, _ = learner_settings(own, run)
        initial = prepare(settings, shown)
        for demonstrations in (initial.demonstrations, initial.heldout_demonstrations):
            if demonstrations is not None:
                demonstrations.check()
        refuse_before_start(replace(settings, warmup=config.warmup), initial)
        refuse_too_large(config, initial.hf_config)
        if config.model.from_run is not None and not RunFiles(config.directory / config.run).origin:
            begin = beginning(config, *chosen_checkpoint(config.directory, config.model.from_run))
            refuse_unfit_checkpoint(begin, initial.hf_config)
