"""Packs the small files of a model directory (config, tokenizer, chat template) into one message."""

import json
from collections.abc import Mapping
from pathlib import Path

from bus.codec import Json
from bus.errors import StorageError
from bus.messages import ModelFiles
from storage.model_files.output_head import has_other_head, untied

CONFIG = "config.json"
QUANTISATION = "quantization_config"
"""Key of config.json that says how the weights are quantised."""
DESCRIBING_SUFFIXES = frozenset({".json", ".jinja", ".model", ".txt"})
"""Endings of the files by which a model and its tokenizer are loaded, besides weights in whatever format."""
TEMPLATES = "additional_chat_templates"
"""Folder with the chat templates of a tokenizer that has several, each by its name."""


def bundle(directory: Path) -> ModelFiles:
    """Return the files in `directory` that describe a model and its tokenizer. The config ties no output
    layer to the embedding where the weights have another one."""
    own = (p for p in directory.iterdir() if p.suffix in DESCRIBING_SUFFIXES)
    files = sorted(p for p in (*own, *named_templates(directory)) if p.is_file())
    names = tuple(p.relative_to(directory).as_posix() for p in files)
    found = ModelFiles(names=names, contents=tuple(p.read_bytes() for p in files))
    return with_config(found, untied(_config(found))) if has_other_head(directory) else found


def unbundle(files: ModelFiles, directory: Path) -> None:
    """Write the files into `directory`, which is created if missing; a name never leads out of it."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in zip(map(Path, files.names), files.contents, strict=True):
        folder = directory / TEMPLATES if name.parent.name == TEMPLATES else directory
        folder.mkdir(exist_ok=True)
        (folder / name.name).write_bytes(content)


def named_templates(directory: Path) -> list[Path]:
    """Return the files of a tokenizer's further chat templates."""
    return sorted((directory / TEMPLATES).glob("*.jinja"))


def with_quantisation(files: ModelFiles, quantisation: Mapping[str, Json]) -> ModelFiles:
    """Return the files with a config.json by which engines load quantised weights."""
    return with_config(files, {**_config(files), QUANTISATION: dict(quantisation)})


def with_dtype(files: ModelFiles, dtype: str) -> ModelFiles:
    """Return the files with a config.json by which servers compute in `dtype`, such as "float32"."""
    found = {key: value for key, value in _config(files).items() if key != "torch_dtype"} | {"dtype": dtype}
    text = found.get("text_config")
    if isinstance(text, dict):
        found["text_config"] = {k: v for k, v in text.items() if k != "torch_dtype"} | {"dtype": dtype}
    return with_config(files, found)


def _config(files: ModelFiles) -> dict[str, Json]:
    found: dict[str, Json] = json.loads(files.contents[files.names.index(CONFIG)])
    return found


def with_config(files: ModelFiles, config: Mapping[str, Json]) -> ModelFiles:
    """Return the files with another config.json."""
    contents = list(files.contents)
    contents[files.names.index(CONFIG)] = (json.dumps(config, indent=2) + "\n").encode()
    return ModelFiles(names=files.names, contents=tuple(contents))


def is_quantised_model(directory: Path) -> bool:
    """Tell whether the weights of a model directory are quantised, by its config.json."""
    return bool(json.loads((directory / CONFIG).read_text()).get(QUANTISATION))


def vocabulary_size(files: ModelFiles) -> int | None:
    """Return the rows of the model's embedding by its config.json; token ids are smaller. None if not said.
    Raises `StorageError` for a config.json that is no JSON object."""
    try:
        config = json.loads(files.contents[files.names.index(CONFIG)])
        found = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    except (ValueError, AttributeError) as error:  # ValueError also when it is not among them
        raise StorageError(f"the model's config.json is no configuration: {error!r}") from error
    return found if isinstance(found, int) else None
