"""Hugging Face model directories."""

import json
import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from bus.errors import ConfigError
from learner.conversion.base import State

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


def load_hf_directory(path: Path) -> tuple[PretrainedConfig, dict[str, Tensor]]:
    """Read `config.json` and all weights, from one safetensors file or an index of several.

    Raises `ConfigError` when something is missing or unreadable.
    """
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} is not a model directory: it has no config.json")
    hf_config = AutoConfig.from_pretrained(path)
    state: dict[str, Tensor] = {}
    for file in _weight_files(path):
        try:
            state |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"cannot read {file}: {error}") from error
    return hf_config, state


def save_hf_directory(
    path: Path, hf_config: PretrainedConfig, state: State, tokenizer_dir: Path | None
) -> None:
    """Write a directory that `AutoModelForCausalLM.from_pretrained` and inference engines load."""
    path.mkdir(parents=True, exist_ok=True)
    hf_config.save_pretrained(path)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    save_file(weights, path / SINGLE_FILE, metadata={"format": "pt"})
    for name in TOKENIZER_FILES:
        if tokenizer_dir is not None and (tokenizer_dir / name).is_file():
            shutil.copyfile(tokenizer_dir / name, path / name)


def _weight_files(path: Path) -> list[Path]:
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    if (path / INDEX_FILE).is_file():
        index = json.loads((path / INDEX_FILE).read_text())
        return [path / name for name in sorted(set(index["weight_map"].values()))]
    raise ConfigError(
        f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}: convert the weights to safetensors"
    )
