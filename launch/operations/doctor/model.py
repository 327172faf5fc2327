"""The model directory of a run: whether it is whole and its parts load."""

from collections.abc import Iterator
from pathlib import Path

from bus.errors import ConfigError
from launch.config import RunConfig
from launch.operations.doctor.findings import Finding, brief
from launch.process.hub_model import is_hub_name
from launch.process.model_directory import (
    model_on_disk,
    refuse_full_context,
    refuse_headless_model,
    refuse_other_angles,
)
from launch.process.weight_files import tensors_in, weight_files

BAD_FILES = (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError)
"""What transformers raises for files that are missing, garbled, or JSON of another shape."""
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
    if not (path / "config.json").is_file():
        yield Finding(
            "model", "error", f"{path} is not a model directory: it has no config.json",
            "give --model.path a directory in Hugging Face format, such as `hf download NAME --local-dir "
            "DIR` makes",
        )  # fmt: skip
        return
    yield from _load(path)
    yield from _weights(path)
    for refuse in (refuse_full_context, refuse_headless_model, refuse_other_angles):
        try:
            refuse(config)
        except ConfigError as error:
            said, _, remedy = str(error).rpartition(": ")
            yield Finding("model", "error", said, remedy)


def _load(path: Path) -> Iterator[Finding]:
    try:
        from transformers import AutoConfig, AutoTokenizer
    except (ImportError, OSError, RuntimeError) as error:  # the last from a torch that is half loaded
        yield Finding(
            "model", "error", f"transformers does not load: {brief(error)}",
            "install torch and transformers again, in versions that fit each other",
        )  # fmt: skip
        return
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except BAD_FILES as error:
        yield Finding("model", "error", f"{path} does not load: {brief(error)}", COMPLETE)
        return
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context is None:
        yield Finding(
            "model", "error", f"the configuration of {path} has no max_position_embeddings: its context is "
            "unknown",
            "take a decoder with a bounded context, such as of Qwen3 or Llama",
        )  # fmt: skip
        return
    yield Finding("model", "ok", f"{path}: {config.model_type}, context {context}, {len(tokenizer)} tokens")
    if not tokenizer.chat_template:
        yield Finding(
            "model", "warning", f"the tokenizer of {path} has no chat template",
            "take an instruction-tuned model, or add chat_template.jinja to the directory",
        )  # fmt: skip


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
    else:
        count = sum(map(len, found.values()))
        yield Finding("weights", "ok", f"{count} tensors in {len(found)} files")
