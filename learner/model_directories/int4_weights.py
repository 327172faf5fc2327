"""Weights in int4 and back, one at a time as they are read, in compressed-tensors' layout pack-quantized.

A weight `x.weight` becomes `x.weight_packed`, eight columns in an int32, the first in the lowest bits, each
with 8 added; `x.weight_scale`, one for each group of columns of a row; and `x.weight_shape`."""

from collections.abc import Mapping

import torch
from torch import Tensor

from bus.codec import Json
from bus.errors import ConfigError, StorageError
from learner.model_directories.lazy_weights import LazyWeights, Spec
from storage.weights.quantisation import Shapes, is_quantised, kept_modules, refuse_fused_experts

GROUP = 128
"""Columns of a row that share a scale."""
METHOD, LAYOUT = "compressed-tensors", "pack-quantized"
PACKED, SCALE, SHAPE = "_packed", "_scale", "_shape"
GROUP_INDEX = "_g_idx"
"""Ends the names of tensors that say which group each column is in, where that is not by its place."""
IN_ORDER = (None, False, "weight", "static")
"""What `actorder` may be where groups are of columns beside each other."""
_COLUMNS = 8
"""Columns in an int32."""
_LARGEST = 7.5
"""Half of the range from -8 to 7, to which the largest magnitude of a group is scaled."""


def int4_config(shapes: Shapes) -> dict[str, Json]:
    """Return `quantization_config` of config.json, as compressed-tensors, SGLang and vLLM read it.

    Raises `ConfigError` for weights that cannot be divided into groups."""
    refuse_fused_experts(shapes)
    for name, shape in shapes.items():
        if is_quantised(name, shape) and shape[1] % GROUP:
            raise ConfigError(
                f"{name} has {shape[1]} columns, which are no multiple of {GROUP}: int4 has groups of so many"
            )
    weights: dict[str, Json] = {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP,
        "dynamic": False,
    }  # fmt: skip
    return {
        "quant_method": METHOD,
        "format": LAYOUT,
        "quantization_status": "compressed",
        "ignore": [*sorted(kept_modules(shapes))],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


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


def packed(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Return the three tensors of a weight by their names. Raises `StorageError` if it is not finite."""
    if not weight.isfinite().all():
        raise StorageError(f"{name} has values that are not finite: int4 has no infinity")
    rows, columns = weight.shape
    groups = weight.float().reshape(rows, columns // GROUP, GROUP)
    scales = (groups.abs().amax(-1) / _LARGEST).to(weight.dtype)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    codes = (groups / scales.float()[..., None]).round_().clamp_(-8, 7).to(torch.int32) + 8
    shifts = 4 * torch.arange(_COLUMNS, dtype=torch.int32)
    words = (codes.reshape(rows, -1, _COLUMNS) << shifts).sum(-1).to(torch.int32)  # the sum wraps around
    return {name + PACKED: words, name + SCALE: scales, name + SHAPE: torch.tensor([rows, columns])}


def unpacked(words: Tensor, scales: Tensor, columns: int) -> Tensor:
    """Return the float32 values of packed codes, [rows, columns]."""
    shifts = 4 * torch.arange(_COLUMNS, dtype=torch.int32)
    codes = ((words[..., None] >> shifts) & 15).reshape(len(words), -1)[:, :columns] - 8
    return codes.float() * scales.float().repeat_interleave(columns // scales.shape[1], 1)


class Int4Weights(LazyWeights):
    """The weights with three tensors in the place of each that is quantised."""

    def __init__(self, weights: LazyWeights) -> None:
        self._weights = weights
        self._source: dict[str, str] = {}
        """The weight of each tensor; its own name if it stays."""
        for name in weights:
            quantised = is_quantised(name, weights.spec(name).shape)
            suffixes = (PACKED, SCALE, SHAPE) if quantised else ("",)
            self._source |= {name + suffix: name for suffix in suffixes}
        super().__init__(self._source)
        self._last: tuple[str, Mapping[str, Tensor]] = "", {}
        """The weight quantised last, whose other tensors are asked for next."""

    def __getitem__(self, name: str) -> Tensor:
        source = self._source[name]
        if source == name:
            return self._weights[name]
        if self._last[0] != source:
            self._last = source, packed(source, self._weights[source])
        return self._last[1][name]

    def spec(self, name: str) -> Spec:
        """Return shape and dtype of a tensor, unread."""
        source = self._source[name]
        (shape, dtype), suffix = self._weights.spec(source), name.removeprefix(source)
        if suffix == PACKED:
            return Spec((shape[0], shape[1] // _COLUMNS), torch.int32)
        if suffix == SCALE:
            return Spec((shape[0], shape[1] // GROUP), dtype)
        return Spec((2,), torch.int64) if suffix == SHAPE else Spec(shape, dtype)


class FromInt4Weights(LazyWeights):
    """The weights that packed codes and scales stand for, in `dtype`; the others are as they are.

    Raises `ConfigError` when it is made for codes whose scales do not fit, or are of columns in another
    order."""

    def __init__(self, weights: LazyWeights, group: int, dtype: torch.dtype) -> None:
        self._weights = weights
        self._dtype = dtype
        self._shapes: dict[str, tuple[int, ...]] = {}
        """Shapes of the weights in int4."""
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
            if shape != (rows, _COLUMNS * columns) or given != wanted or shape[1] % group:
                raise ConfigError(
                    f"{name}{SCALE} must be {list(wanted)} for {list(shape)}, and is {list(given)}"
                )
            self._shapes[name] = shape
        gone = {name + suffix for name in self._shapes for suffix in (PACKED, SCALE, SHAPE)}
        kept = (name for name in weights if name not in gone or name.endswith(PACKED))
        super().__init__(dict.fromkeys(name.removesuffix(PACKED) for name in kept))

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._shapes:
            return self._weights[name]
        words, scales = self._weights[name + PACKED], self._weights[name + SCALE]
        found = unpacked(words, scales, self._shapes[name][1])
        if not found.isfinite().all():
            raise StorageError(f"{name} has values that are not finite: its scales are damaged")
        return found.to(self._dtype)

    def spec(self, name: str) -> Spec:
        """Return shape and dtype of a tensor, unread."""
        return Spec(self._shapes[name], self._dtype) if name in self._shapes else self._weights.spec(name)
