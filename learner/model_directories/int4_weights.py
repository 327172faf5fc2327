"""Weights in int4 that are no longer quantised, one at a time as they are read."""

from collections.abc import Mapping
from concurrent.futures import Executor

import numpy as np
import torch
from torch import Tensor

from bus.codec import Json
from bus.errors import ConfigError, StorageError
from learner.model_directories.lazy_weights import LazyWeights, Spec
from storage.weights.int4 import PACKED_COLUMNS, unpacked
from storage.weights.quantisation import LAYOUT, PACKED, SHAPE
from storage.weights.quantisation import TENSOR_SCALE as SCALE

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


class FromInt4Weights(LazyWeights):
    """The weights that packed codes and scales stand for, in `dtype`; the others are as they are.

    Raises `ConfigError` when it is made for codes whose scales do not fit, or are of columns in another
    order."""

    def __init__(
        self, weights: LazyWeights, group: int, dtype: torch.dtype, threads: Executor | None = None
    ) -> None:
        self._weights = weights
        self._threads = threads
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
            if shape != (rows, PACKED_COLUMNS * columns) or given != wanted or shape[1] % group:
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
        words, scales = self._weights[name + PACKED].numpy(), self._weights[name + SCALE].float().numpy()
        found = torch.from_numpy(
            unpacked(words.view(np.uint32), scales, self._shapes[name][1], self._threads)
        )
        if not found.isfinite().all():
            raise StorageError(f"{name} has values that are not finite: its scales are damaged")
        return found.to(self._dtype)

    def spec(self, name: str) -> Spec:
        return Spec(self._shapes[name], self._dtype) if name in self._shapes else self._weights.spec(name)
