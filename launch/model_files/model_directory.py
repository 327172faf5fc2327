"""What a model directory on this host says before anything is loaded from it."""

from collections.abc import Iterator, Set
from pathlib import Path
from typing import TYPE_CHECKING

from actors.engines.dynamic_angles import refuse_dynamic_angles
from bus.errors import ConfigError
from bus.process.work_progress import tracked
from launch.model_files.hub_model import REMEDY, fetched, fetched_before, is_hub_name
from launch.model_files.hub_revision import pinned
from launch.settings.run_config import RunConfig
from learner.config.mtp import Heads, refuse_headless
from storage.disk.run_directory import RunDirectory
from storage.model_files.finite_weights import refuse_not_finite
from storage.model_files.model_reading import (
    AGAIN,
    lack_of_model,
    raw_config,
    read_tokenizer,
    refuse_no_template,
    refusing,
)
from storage.model_files.weight_files import weight_files

if TYPE_CHECKING:
    from torch import Tensor


def tensors_in(file: Path) -> set[str]:
    """Return the names of the tensors in a file. Raises `ValueError` for one that is not whole."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as opened:
            return set(opened.keys())
    except SafetensorError as error:
        raise ValueError(f"{file.name} is damaged ({error})") from error


def read_tensors(model: Path) -> "Iterator[tuple[str, Tensor]]":
    """Read the tensors of a model one after the other, each with its name. Raises `ConfigError` where there
    are no files of weights, or one is not whole."""
    from safetensors import safe_open

    for file in tracked([model / name for name in weight_files(model)], f"reading the weights in {model}"):
        with refusing(f"cannot read {file}", AGAIN), safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - the file is no mapping
                yield name, opened.get_tensor(name)


def refuse_not_finite_model(config: RunConfig) -> None:
    """Raise `ConfigError` for a model on this host whose weights are not finite, which takes a reading of all
    its files."""
    if config.model.path is None:
        return
    model = model_on_disk(pinned(config.model.path, RunDirectory(config.directory, config.run)))
    if (model / "config.json").is_file():
        refuse_not_finite(read_tensors(model), model)


def all_tensors(model: Path) -> Set[str]:
    """Return the names of all tensors of a model, by the index where there is one. Raises as `weight_files`
    and `tensors_in`."""
    files = weight_files(model).items()
    return set().union(*(tensors or tensors_in(model / name) for name, tensors in files))


TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
"""Files of which a tokenizer has one at least."""


def model_directory(path: Path, *, setting: str = "model.path") -> Path:
    """Return the directory that `setting` names as `path`, fetching a model of the Hugging Face hub. Raises
    `ConfigError` when there is no such model."""
    found = fetched(path, setting) if is_hub_name(path) else path
    if lack := lack_of_model(found):
        remedy = _instead_of_export(found) or REMEDY
        raise ConfigError(f"{setting}: {found} is not a model directory: {lack}; {remedy}")
    return found


def _instead_of_export(path: Path) -> str:
    """Return what to take in place of the export of a run that has none yet; nothing for another path."""
    run = path.absolute().parent
    if path.name != "export" or not (run / "learner.json").is_file():
        return ""
    return (
        f"run {run.name!r} has not ended, and exports its model when it does: until then "
        f"`launch eval --checkpoint {run}` measures its newest checkpoint"
    )


def lack_of_chat(model: Path) -> str:
    """Return why nobody can chat with the model in a directory that has a tokenizer, and the remedy; empty
    where everybody can, or there is no tokenizer."""
    if not any((model / name).is_file() for name in TOKENIZERS):
        return ""
    try:
        refuse_no_template(read_tokenizer(model), model)
    except ConfigError as error:
        return str(error)
    return ""


def model_on_disk(path: Path) -> Path:
    """Return the directory that `model.path` names, without fetching anything; it may be missing."""
    return (fetched_before(path) if is_hub_name(path) else path) or path


def model_of_run(config: RunConfig, run: RunDirectory) -> Path:
    """Return the directory of the model that a run began with, without fetching anything."""
    if config.model.path is None:
        return run.path / "model"
    return model_on_disk(pinned(config.model.path, run))


def model_here(path: Path | None, run: RunDirectory) -> Path | None:
    """Return the run's model directory if it is on this host, with all that prompts are checked against."""
    if path is None:
        return None
    found = model_on_disk(pinned(path, run))
    tokenizer = any((found / name).is_file() for name in TOKENIZERS)
    return found if (found / "config.json").is_file() and tokenizer else None


def refuse_full_context(config: RunConfig) -> None:
    """Raise `ConfigError` for answers that leave no room for a prompt in the model's context. A model on
    another host is not seen from here: storage checks it, when the learner has published it."""
    if config.learner.steps == 0:  # a run on demonstrations alone samples nothing
        return
    limit, context = config.sampling.max_new_tokens, config.model.scratch.context
    name = "model.scratch.context is"
    if config.model.path is not None:
        run = RunDirectory(config.directory, config.run)
        found = _context_of(model_on_disk(pinned(config.model.path, run)))
        if found is None:
            return
        context, name = found, f"{config.model.path} has a context of"
    elif config.model.scratch == type(config.model.scratch)():
        return  # nobody has chosen that model: the learner's host may name another
    if limit >= context:
        raise ConfigError(
            f"sampling.max_new_tokens={limit} leaves no room for a prompt, since {name} {context}: lower it"
        )


def refuse_other_angles(config: RunConfig) -> None:
    """Raise `ConfigError` for a model that SGLang computes otherwise than the learner, where it serves any. A
    model on another host is not seen from here: actors refuse it before they start an engine."""
    serves = not config.actors.engine.in_process or config.actors.evaluation.has_own_servers
    if config.model.path is not None and serves:
        model = model_on_disk(pinned(config.model.path, RunDirectory(config.directory, config.run)))
        refuse_dynamic_angles(config.model.path, raw_config(model))


def refuse_headless_model(config: RunConfig) -> None:
    """Raise `ConfigError` where `learner.mtp` is to train a head that the model or its files do not have. A
    model on another host is not seen from here: the learner refuses it when it loads it. Nor are files that
    cannot be read: whoever loads the model says what is wrong with them."""
    mtp = config.learner.mtp
    if not mtp.exists:
        return
    if config.model.path is None:
        refuse_headless(mtp, Heads.of({"model_type": "qwen3"}, None))  # the scratch model
        return
    model = model_on_disk(pinned(config.model.path, RunDirectory(config.directory, config.run)))
    found = raw_config(model)
    if not found.get("model_type"):
        return
    refuse_headless(mtp, Heads.of(found, None))
    try:
        names = all_tensors(model)
    except (OSError, ValueError):
        return
    refuse_headless(mtp, Heads.of(found, names))


def _context_of(model: Path) -> int | None:
    """Return the context that a model directory's config.json names, if it is here and names one."""
    found = raw_config(model)
    text = found.get("text_config")
    context = (text if isinstance(text, dict) else found).get("max_position_embeddings")
    return context if isinstance(context, int) else None
