"""Hugging Face model directories."""

import json
import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

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
    try:
        hf_config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot read {path / 'config.json'}: {_first_line(error)}") from error
    state: dict[str, Tensor] = {}
    for file in _weight_files(path):
        try:
            state |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"cannot read {file}: {error}") from error
    return hf_config, state


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Read the tokenizer. Raises `ConfigError` when it is not there: transformers would make one up."""
    if not any((path / name).is_file() for name in TOKENIZER_FILES if name.startswith("tokenizer")):
        raise ConfigError(f"{path} has no tokenizer: it needs tokenizer.json or tokenizer.model")
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot read the tokenizer in {path}: {_first_line(error)}") from error


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


def _first_line(error: Exception) -> str:
    """What transformers says, without its advice to update itself."""
    return next(iter(str(error).splitlines()), type(error).__name__)
