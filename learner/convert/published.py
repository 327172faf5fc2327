"""Reads checkpoints as DeepSeek and Moonshot publish them: weights in fp8, and a model type of their own."""

from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from bus.codec import Json
from bus.errors import ConfigError
from learner.backends.model_loading import load_hf_directory
from learner.model_directories.lazy_weights import LazyWeights
from learner.model_directories.model_directory import ALIASES, STORED_DTYPES, HFWeights, raw_config
from learner.model_directories.quantised_weights import DequantisedWeights, blocks_of
from storage.model_files.model_reading import AGAIN, refusing
from storage.weights.fp8 import Blocks


def load_published(directory: Path) -> tuple[PretrainedConfig, LazyWeights]:
    """Read a model directory; weights in fp8 with a scale for each block are read as bfloat16.

    Raises `ConfigError` as `load_hf_directory` does, and for scales that do not fit their weights."""
    raw = raw_config(directory)
    model_type = str(raw.get("model_type"))
    block = _block_of(directory / "config.json", raw.get("quantization_config"))
    if model_type not in ALIASES and block is None:
        return load_hf_directory(directory)
    kind = ALIASES.get(model_type, model_type)
    left_out = ("auto_map", *(("quantization_config",) if block else ()))
    known = {name: value for name, value in raw.items() if name not in left_out}
    with refusing(f"cannot read {directory / 'config.json'}", AGAIN):
        hf_config = CONFIG_MAPPING[kind].from_dict({**known, "model_type": kind})
    if block is None:
        return hf_config, HFWeights(directory)
    return hf_config, DequantisedWeights(HFWeights(directory, STORED_DTYPES), block, torch.bfloat16)


def _block_of(config: Path, quantized: Json) -> Blocks | None:
    """Return which elements share a scale; None for weights that are not such."""
    if not isinstance(quantized, dict | None):
        raise ConfigError(f"{config}: quantization_config={quantized!r} is no object of settings")
    if quantized is None or quantized.get("quant_method") != "fp8":
        return None
    return blocks_of(config, quantized.get("weight_block_size"))
