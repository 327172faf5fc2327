"""The files of a directory that hold a model's weights, chosen as transformers does. Other safetensors files
may lie beside: another format of the same weights, an adapter, an older part."""

import json
from collections.abc import Mapping
from pathlib import Path

from bus.errors import ConfigError
from storage.model_files.model_reading import AGAIN

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
RESAVED = "load the model by transformers, and write it anew by save_pretrained"
FOUND_INSTEAD = {
    "*.gguf": "`launch convert gguf` makes a model directory of it",
    "adapter_model.safetensors": "merge the adapters into their model (peft: merge_and_unload), and save it",
    "*.safetensors": f"name a single file {SINGLE_FILE}; download the index of several",
    "*.bin": RESAVED,
    "*.pt*": RESAVED,
    "*.h5": RESAVED,
}
"""What to do where there are other files only."""


def weight_files(directory: Path) -> Mapping[str, set[str]]:
    """Return the names of a model's files of weights in order, each with the tensors that the index says are
    in it; none without an index. Raises `ConfigError` where there are none, or the index is unreadable."""
    if (directory / SINGLE_FILE).is_file():
        return {SINGLE_FILE: set()}
    index = directory / INDEX_FILE
    if not index.is_file():
        raise ConfigError(
            f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}: {_instead(directory) or AGAIN}"
        )
    try:
        found = json.loads(index.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {index} ({error!r}): {AGAIN}") from error
    files_by_tensor = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(files_by_tensor, dict):
        raise ConfigError(f"{index} has no weight_map, which names the file of each tensor: {AGAIN}")
    files: dict[str, set[str]] = {}
    for tensor, name in files_by_tensor.items():
        if not isinstance(name, str):
            raise ConfigError(f"{index}: the file of {tensor} is {name!r}, which is no name: {AGAIN}")
        files.setdefault(name, set()).add(tensor)
    return dict(sorted(files.items()))


def _instead(directory: Path) -> str:
    """Return what to do with the first other file of weights; nothing where there is none."""
    for pattern, remedy in FOUND_INSTEAD.items():
        for file in sorted(directory.glob(pattern)):
            if file.is_file():
                return f"there is {file.name}: {remedy}"
    return ""
