"""Weights that are quantised, or no longer quantised, one at a time as they are read.

In MXFP4, as gpt-oss is published, a tensor `x` of all experts, [experts, inputs, outputs], is stored as
`x_blocks`, uint8 [experts, outputs, inputs / 32, 16], of which each byte has two elements, the first in its
lower half, and `x_scales`, uint8 [experts, outputs, inputs / 32], exponents of 2 with 127 added (OCP
Microscaling Formats 1.0, section 5)."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bus.codec import Json
from bus.errors import ConfigError, StorageError
from learner.host_memory.copies import NAMES, host_tensors
from learner.model_directories.lazy_weights import ChangedWeights, LazyWeights, Spec
from storage.weights.fp8 import TASK_ELEMENTS, Blocks, dequantised
from storage.weights.int4 import PACKED_COLUMNS, unpacked
from storage.weights.quantisation import (
    LAYOUT,
    PACKED,
    SHAPE,
    FileFormat,
    is_quantised,
    scale_names,
    weight_of,
)
from storage.weights.quantisation import TENSOR_SCALE as SCALE
from storage.weights.quantised_tensors import quantised
from storage.weights.tensors import TORCH_DTYPES, HostTensor

CODES = torch.float8_e4m3fn
INPUT_SCALE = ".input_scale"
"""Ends the names of scales of activations, which weights alone do not need."""


class QuantisedWeights(ChangedWeights):
    """The weights with codes and scales in the place of those that are quantised."""

    def __init__(self, weights: LazyWeights, found: FileFormat, threads: Executor | None = None) -> None:
        self._format = found
        self._threads = threads
        self._sources: dict[str, str] = {}
        """The weight of each tensor; its own name if it stays."""
        specs: dict[str, Spec] = {}
        for name in weights:
            shape, dtype = weights.spec(name)
            if not is_quantised(name, shape):
                self._sources[name] = name
                continue
            for end, (stored, sizes) in found.stored(shape, NAMES[dtype]).items():
                self._sources[name + end] = name
                specs[name + end] = Spec(sizes, getattr(torch, TORCH_DTYPES[stored]))
        super().__init__(weights, self._sources, specs)
        self._last: tuple[str, Mapping[str, HostTensor]] = "", {}
        """The weight quantised last, whose other tensors are asked for next."""

    def make(self, name: str) -> Tensor:
        weight = self._sources[name]
        if self._last[0] != weight:
            source = host_tensors({weight: self._weights[weight].contiguous()})
            self._last = weight, quantised(source, self._format, self._threads, task_elements=TASK_ELEMENTS)
        found = self._last[1][name]
        kind = f"i{found.words.itemsize}"
        return torch.from_numpy(found.words.view(kind)).view(self.spec(name).dtype).reshape(found.shape)


class DequantisedWeights(ChangedWeights):
    """The weights that codes and scales stand for, in `dtype`; the others are as they are.

    Raises `ConfigError` when it is made for codes without scales, scales without codes, and scales of other
    blocks."""

    def __init__(
        self, weights: LazyWeights, blocks: Blocks | None, dtype: torch.dtype, threads: Executor | None = None
    ) -> None:
        """Take what is stored; `blocks` are None where each tensor has one scale, or each row has."""
        self._threads = threads
        self._blocks = blocks
        self._dtype = dtype
        self._scale_of = dict(_scales_of_codes(weights, blocks))
        scales = set(self._scale_of.values())
        kept = (name for name in weights if name not in scales and not name.endswith(INPUT_SCALE))
        made = {name: Spec(weights.spec(name).shape, dtype) for name in self._scale_of}
        super().__init__(weights, dict.fromkeys(kept), made)

    def make(self, name: str) -> Tensor:
        codes, scales = self._weights[name], self._weights[self._scale_of[name]].float()
        of_rows = self._blocks is None and scales.numel() > 1
        blocks = self._blocks or Blocks(1, codes.shape[1])
        found = torch.from_numpy(
            dequantised(
                codes.contiguous().view(torch.uint8).numpy(),
                (scales.reshape(-1, 1) if of_rows else scales).numpy(),
                blocks,
                self._threads,
            )
        )
        if not found.isfinite().all():
            raise StorageError(f"{name} has values that are not finite: codes or scales are damaged")
        return found.to(self._dtype)


def blocks_of(config: Path, size: Json) -> Blocks | None:
    """Return which elements share a scale by the `weight_block_size` of a configuration; None where it names
    none. Raises `ConfigError` for what is no pair of sizes."""
    if size is None:
        return None
    pair = [n for n in size if type(n) is int and n > 0] if isinstance(size, list) else []
    if len(pair) != 2 or pair != size:
        raise ConfigError(
            f"{config}: weight_block_size={size!r} is no pair of sizes: it must be rows and columns, as "
            "[128, 128]"
        )
    return Blocks(*pair)


def _scales_of_codes(weights: LazyWeights, blocks: Blocks | None) -> Iterator[tuple[str, str]]:
    for name in weights:
        weight = weight_of(name)
        if weight is not None and (weight not in weights or weights.spec(weight).dtype != CODES):
            found_as = f"is {weights.spec(weight).dtype}" if weight in weights else "is missing"
            raise ConfigError(
                f"{name} are scales of {weight}, which {found_as}: it must be in fp8, or have no scales"
            )
        shape, dtype = weights.spec(name)
        if dtype != CODES:
            continue
        found = [scale for scale in scale_names(name) if scale in weights]
        if len(shape) != 2 or not found:
            lacks = "is no matrix" if found else "has no scales"
            raise ConfigError(
                f"{name} is in fp8, of shape {list(shape)}, and {lacks}: a matrix with "
                f"{' or '.join(scale_names(name))} can be converted"
            )
        counts = (shape[0], 1) if blocks is None else blocks.counts(shape)
        given = weights.spec(found[0]).shape
        if given != counts and (blocks is not None or given not in ((), (1,), (1, 1), (shape[0],))):
            raise ConfigError(f"{found[0]} must be {list(counts)}, and is {list(given)}")
        yield name, found[0]


MXFP4 = "mxfp4"
BLOCKS, SCALES = "_blocks", "_scales"
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = torch.tensor([*_MAGNITUDES, *(-each for each in _MAGNITUDES)])
"""Values of the 16 codes of an element: a sign, two bits of an exponent, and one of a mantissa."""
_BIAS, _NAN = 127, 255
_ELEMENTS = 32
"""Elements that share a scale."""


class FromMxfp4Weights(ChangedWeights):
    """The weights that blocks and scales stand for, in `dtype`; the others are as they are. Raises
    `ConfigError` when it is made for blocks whose scales do not fit."""

    def __init__(self, weights: LazyWeights, dtype: torch.dtype) -> None:
        made: dict[str, Spec] = {}
        for name in (found.removesuffix(BLOCKS) for found in weights if found.endswith(BLOCKS)):
            shape = weights.spec(name + BLOCKS).shape
            scales = weights.spec(name + SCALES).shape if name + SCALES in weights else None
            if len(shape) != 4 or shape[3] * 2 != _ELEMENTS or scales != shape[:3]:
                raise ConfigError(
                    f"{name}{BLOCKS} is {list(shape)}, and {name}{SCALES} is "
                    f"{'missing' if scales is None else list(scales)}: blocks must be [experts, outputs, "
                    "inputs / 32, 16], and their scales the same without the last"
                )
            made[name] = Spec((shape[0], shape[2] * _ELEMENTS, shape[1]), dtype)
        gone = {name + suffix for name in made for suffix in (BLOCKS, SCALES)}
        kept = (name for name in weights if name not in gone or name.endswith(BLOCKS))
        super().__init__(weights, dict.fromkeys(name.removesuffix(BLOCKS) for name in kept), made)

    def make(self, name: str) -> Tensor:
        blocks, scales = self._weights[name + BLOCKS], self._weights[name + SCALES]
        if (scales == _NAN).any():
            raise StorageError(f"{name}{SCALES} has {_NAN}, which is no number: the file is damaged")
        whole = torch.empty(self.spec(name).shape, dtype=self.spec(name).dtype)
        for expert, (codes, exponents) in enumerate(zip(blocks, scales, strict=True)):
            whole[expert] = decoded(codes, exponents).t()
        return whole


def decoded(codes: Tensor, exponents: Tensor) -> Tensor:
    """Return float32 [outputs, inputs] of one expert's blocks [outputs, inputs / 32, 16] and scales."""
    pairs = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    values = torch.ldexp(VALUES[pairs.long()], exponents[..., None].int() - _BIAS)
    return values.flatten(1)


GROUP_INDEX = "_g_idx"
"""Ends the names of tensors that say which group each column is in, where that is not by its place."""
IN_ORDER = (None, False, "weight", "static")
"""What `actorder` may be where groups are of columns beside each other."""


def group_size(config: Mapping[str, Json]) -> int | None:
    """Return how many columns beside each other share a scale, by a `quantization_config`; None where it is
    another format."""
    groups = config.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, dict) else []
    if config.get("format") != LAYOUT or len(schemes) != 1 or not isinstance(schemes[0], dict):
        return None
    weights = schemes[0].get("weights")
    if not isinstance(weights, dict) or (weights.get("num_bits"), weights.get("symmetric")) != (4, True):
        return None
    if weights.get("actorder") not in IN_ORDER:
        return None
    size = weights.get("group_size")
    return size if isinstance(size, int) and size > 0 else None


class FromInt4Weights(ChangedWeights):
    """The weights that packed codes and scales stand for, in `dtype`; the others are as they are.

    Raises `ConfigError` when it is made for codes whose scales do not fit, or are of columns in another
    order."""

    def __init__(
        self, weights: LazyWeights, group: int, dtype: torch.dtype, threads: Executor | None = None
    ) -> None:
        self._threads = threads
        made: dict[str, Spec] = {}
        for name in (found.removesuffix(PACKED) for found in weights if found.endswith(PACKED)):
            if name + SCALE not in weights or name + SHAPE not in weights:
                raise ConfigError(f"{name}{PACKED} has no {name}{SCALE} or no {name}{SHAPE} beside it")
            if name + GROUP_INDEX in weights:
                raise ConfigError(
                    f"{name}{GROUP_INDEX} puts columns into groups in another order than theirs (actorder): "
                    "groups of columns beside each other alone can be converted"
                )
            shape = tuple(weights[name + SHAPE].tolist())
            rows, columns = weights.spec(name + PACKED).shape
            given = weights.spec(name + SCALE).shape
            wanted = (rows, shape[1] // group)
            if shape != (rows, PACKED_COLUMNS * columns) or given != wanted or shape[1] % group:
                raise ConfigError(
                    f"{name}{SCALE} must be {list(wanted)} for {list(shape)}, and is {list(given)}"
                )
            made[name] = Spec(shape, dtype)
        gone = {name + suffix for name in made for suffix in (PACKED, SCALE, SHAPE)}
        kept = (name for name in weights if name not in gone or name.endswith(PACKED))
        super().__init__(weights, dict.fromkeys(name.removesuffix(PACKED) for name in kept), made)

    def make(self, name: str) -> Tensor:
        words, scales = self._weights[name + PACKED].numpy(), self._weights[name + SCALE].float().numpy()
        found = torch.from_numpy(
            unpacked(words.view(np.uint32), scales, self.spec(name).shape[1], self._threads)
        )
        if not found.isfinite().all():
            raise StorageError(f"{name} has values that are not finite: its scales are damaged")
        return found.to(self.spec(name).dtype)
