"""Reads checkpoints as DeepSeek and Moonshot publish them: weights in fp8, and a model type of their own."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from bus.errors import ConfigError
from learner.lazy_weights import State
from learner.model_directory import STORED_DTYPES, UNREADABLE, HFWeights, load_hf_directory
from learner.quantised_weights import DequantisedWeights
from storage.weights.fp8 import Blocks

ALIASES = {"kimi_k2": "deepseek_v3"}
"""Model types whose configuration and model are another's."""


def load_published(directory: Path) -> tuple[PretrainedConfig, State]:
    """Read a model directory; weights in fp8 with a scale for each block are read as bfloat16.

    Raises `ConfigError` as `load_hf_directory` does, and for scales that do not fit their weights."""
    raw = _raw_config(directory)
    model_type = raw.get("model_type")
    block = _block_of(raw)
    if model_type not in ALIASES and block is None:
        return load_hf_directory(directory)
    kind = ALIASES.get(str(model_type), str(model_type))
    left_out = ("auto_map", *(("quantization_config",) if block else ()))
    known = {name: value for name, value in raw.items() if name not in left_out}
    try:
        hf_config = CONFIG_MAPPING[kind].from_dict({**known, "model_type": kind})
    except UNREADABLE as error:
        raise ConfigError(f"cannot read {directory / 'config.json'}: {error!r}") from error
    if block is None:
        return hf_config, HFWeights(directory)
    return hf_config, DequantisedWeights(HFWeights(directory, STORED_DTYPES), block, torch.bfloat16)


def _raw_config(directory: Path) -> dict[str, Any]:
    """Return what config.json says; nothing where it is missing or unreadable, which others tell."""
    try:
        found = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _block_of(raw: dict[str, Any]) -> Blocks | None:
    """Return rows and columns of the blocks that share a scale; None for weights that are not such."""
    quantized = raw.get("quantization_config") or {}
    sizes = quantized.get("weight_block_size")
    if quantized.get("quant_method") != "fp8" or not sizes:
        return None
    rows, columns = map(int, sizes)
    return Blocks(rows, columns)
