"""Reads checkpoints as DeepSeek and Moonshot publish them: weights in fp8, and a model type of their own."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig

from bus.errors import ConfigError
from learner.lazy_weights import LazyWeights, Spec, State
from learner.model_directory import DTYPES, UNREADABLE, HFWeights, load_hf_directory

SCALE = "_scale_inv"
"""Ends the name of the scales of a weight's blocks, behind the weight's own."""
FP8 = {"F8_E4M3": torch.float8_e4m3fn}
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
    return hf_config, HFWeights(directory) if block is None else BlockScaledWeights(directory, block)


def _raw_config(directory: Path) -> dict[str, Any]:
    """Return what config.json says; nothing where it is missing or unreadable, which others tell."""
    try:
        found = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _block_of(raw: dict[str, Any]) -> tuple[int, int] | None:
    """Return rows and columns of the blocks that share a scale; None for weights that are not such."""
    quantized = raw.get("quantization_config") or {}
    sizes = quantized.get("weight_block_size")
    if quantized.get("quant_method") != "fp8" or not sizes:
        return None
    rows, columns = map(int, sizes)
    return rows, columns


class BlockScaledWeights(LazyWeights):
    """Weights of a directory in fp8, each times the scale of its block, as bfloat16 (arXiv:2412.19437,
    section 3.3.2); others are as they lie there."""

    def __init__(self, directory: Path, block: tuple[int, int]) -> None:
        """Read the headers. Raises `ConfigError` for weights without scales, and scales of other blocks."""
        self._files = HFWeights(directory, {**DTYPES, **FP8})
        self._block = block
        self._names = {name: None for name in self._files if not name.endswith(SCALE)}
        for name in filter(self._is_scaled, self._names):
            rows, columns = self._files.spec(name).shape
            wanted = -(-rows // block[0]), -(-columns // block[1])
            scales = name + SCALE
            found = self._files.spec(scales).shape if scales in self._files else "not there"
            if found != wanted:
                raise ConfigError(f"{directory}: {scales} must be {list(wanted)}, and is {found}")

    def _is_scaled(self, name: str) -> bool:
        return self._files.spec(name).dtype in FP8.values()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        weight = self._files[name]
        if not self._is_scaled(name):
            return weight
        scales = self._files[name + SCALE].float()
        for dimension, size in enumerate(self._block):
            scales = scales.repeat_interleave(size, dimension).narrow(dimension, 0, weight.shape[dimension])
        return (weight.float() * scales).to(torch.bfloat16)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def spec(self, name: str) -> Spec:
        """Return shape and dtype of what is read."""
        shape, dtype = self._files.spec(name)
        return Spec(shape, torch.bfloat16 if dtype in FP8.values() else dtype)
