"""The model directory of a run: whether it is whole and its parts load."""

from collections.abc import Iterator
from pathlib import Path

from bus.errors import ConfigError
from launch.doctor.findings import Finding, brief, refused, worst
from launch.model_files.hub_model import is_hub_name
from launch.model_files.model_directory import (
    model_on_disk,
    read_tensors,
    refuse_full_context,
    refuse_headless_model,
    refuse_other_angles,
    tensors_in,
)
from launch.settings.run_config import RunConfig
from storage.model_files.finite_weights import not_finite
from storage.model_files.model_reading import (
    context_of,
    lack_of_model,
    read_config,
    read_tokenizer,
    refuse_no_template,
)
from storage.model_files.weight_files import weight_files

COMPLETE = "download the directory again: a copy was cut short"


def check_model(config: RunConfig) -> Iterator[Finding]:
    """Tell whether configuration, tokenizer and weights of the model load. Loads transformers."""
    if config.model.path is None:
        yield Finding("model", "ok", "none is named (model.path): a small random one is made")
        return
    path = model_on_disk(config.model.path)
    if is_hub_name(path):
        yield Finding(
            "model", "warning", f"{path} is not on this host: it is fetched from the Hugging Face hub when a "
            "run starts, if it is a name there",
            "fetch it before, with `hf download NAME`, or give --model.path a directory",
        )  # fmt: skip
        return
    if lack := lack_of_model(path):
        yield Finding(
            "model", "error", f"{path} is not a model directory: {lack}",
            "give --model.path a directory in Hugging Face format, such as `hf download NAME --local-dir "
            "DIR` makes",
        )  # fmt: skip
        return
    findings = [*_load(path), *_weights(path)]
    yield from findings
    if worst(findings) != "error":
        yield from _trained(config, path)
    for refuse in (refuse_full_context, refuse_headless_model, refuse_other_angles):
        try:
            refuse(config)
        except ConfigError as error:
            yield refused("model", error, COMPLETE)


def _trained(config: RunConfig, path: Path) -> Iterator[Finding]:
    from launch.checks.model_check import refuse_model

    found = config.model_copy(update={"model": config.model.model_copy(update={"path": path.resolve()})})
    try:
        refuse_model(found)
    except ConfigError as error:
        yield refused("model", error, COMPLETE)
    else:
        yield Finding("training", "ok", f"learner.backend={config.learner.backend} trains this model")


def _load(path: Path) -> Iterator[Finding]:
    try:
        import transformers  # noqa: F401 - what follows needs it
    except (ImportError, OSError, RuntimeError) as error:  # the last from a torch that is half loaded
        yield Finding(
            "model", "error", f"transformers does not load: {brief(error)}",
            "install torch and transformers again, in versions that fit each other",
        )  # fmt: skip
        return
    try:
        config = read_config(path)
        context = context_of(config, path)
        tokenizer = read_tokenizer(path)
    except ConfigError as error:
        yield refused("model", error, COMPLETE)
        return
    yield Finding("model", "ok", f"{path}: {config.model_type}, context {context}, {len(tokenizer)} tokens")
    try:
        refuse_no_template(tokenizer, path)
    except ConfigError as error:
        yield refused("model", error, COMPLETE)


def _weights(path: Path) -> Iterator[Finding]:
    """Tell whether every file of weights is there, whole and with the tensors that the index names."""
    try:
        wanted = weight_files(path)
        found = {name: tensors_in(path / name) for name in wanted}
    except (OSError, ValueError) as error:
        yield Finding("weights", "error", f"{path}: {error}", COMPLETE)
        return
    missing = [tensor for name, tensors in wanted.items() for tensor in sorted(tensors - found[name])]
    if missing:
        yield Finding(
            "weights", "error", f"{path} lacks {len(missing)} tensors, such as {missing[0]}", COMPLETE
        )
        return
    broken = not_finite(read_tensors(path))
    if broken:
        said = f"{path}: {len(broken)} weights hold NaN or infinity, such as {broken[0]}"
        yield Finding("weights", "error", said, "download the directory again")
    else:
        count = sum(map(len, found.values()))
        yield Finding("weights", "ok", f"{count} tensors in {len(found)} files")
