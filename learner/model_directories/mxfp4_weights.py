"""Experts in MXFP4, as gpt-oss is published, made into bfloat16 or float32 as they are read.

A tensor `x` of all experts, [experts, inputs, outputs], is stored as `x_blocks`, uint8 [experts, outputs,
inputs / 32, 16], of which each byte has two elements, the first in its lower half, and `x_scales`, uint8
[experts, outputs, inputs / 32], exponents of 2 with 127 added (OCP Microscaling Formats 1.0, section 5)."""

import torch
from torch import Tensor

from bus.errors import ConfigError, StorageError
from learner.model_directories.lazy_weights import LazyWeights, Spec

METHOD = "mxfp4"
BLOCKS, SCALES = "_blocks", "_scales"
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = torch.tensor([*_MAGNITUDES, *(-each for each in _MAGNITUDES)])
"""Values of the 16 codes of an element: a sign, two bits of an exponent, and one of a mantissa."""
_BIAS, _NAN = 127, 255
_ELEMENTS = 32
"""Elements that share a scale."""


class FromMxfp4Weights(LazyWeights):
    """The weights that blocks and scales stand for, in `dtype`; the others are as they are.

    Raises `ConfigError` when it is made for blocks whose scales do not fit."""

    def __init__(self, weights: LazyWeights, dtype: torch.dtype) -> None:
        self._weights = weights
        self._dtype = dtype
        self._shapes: dict[str, tuple[int, ...]] = {}
        """Shapes of the weights in MXFP4."""
        for name in (found.removesuffix(BLOCKS) for found in weights if found.endswith(BLOCKS)):
            shape = weights.spec(name + BLOCKS).shape
            scales = weights.spec(name + SCALES).shape if name + SCALES in weights else None
            if len(shape) != 4 or shape[3] * 2 != _ELEMENTS or scales != shape[:3]:
                raise ConfigError(
                    f"{name}{BLOCKS} is {list(shape)}, and {name}{SCALES} is "
                    f"{'missing' if scales is None else list(scales)}: blocks must be [experts, outputs, "
                    "inputs / 32, 16], and their scales the same without the last"
                )
            self._shapes[name] = (shape[0], shape[2] * _ELEMENTS, shape[1])
        gone = {name + suffix for name in self._shapes for suffix in (BLOCKS, SCALES)}
        kept = (name for name in weights if name not in gone or name.endswith(BLOCKS))
        super().__init__(dict.fromkeys(name.removesuffix(BLOCKS) for name in kept))

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._shapes:
            return self._weights[name]
        blocks, scales = self._weights[name + BLOCKS], self._weights[name + SCALES]
        if (scales == _NAN).any():
            raise StorageError(f"{name}{SCALES} has {_NAN}, which is no number: the file is damaged")
        whole = torch.empty(self._shapes[name], dtype=self._dtype)
        for expert, (codes, exponents) in enumerate(zip(blocks, scales, strict=True)):
            whole[expert] = decoded(codes, exponents).t()
        return whole

    def spec(self, name: str) -> Spec:
        return Spec(self._shapes[name], self._dtype) if name in self._shapes else self._weights.spec(name)


def decoded(codes: Tensor, exponents: Tensor) -> Tensor:
    """Return float32 [outputs, inputs] of one expert's blocks [outputs, inputs / 32, 16] and scales."""
    pairs = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    values = torch.ldexp(VALUES[pairs.long()], exponents[..., None].int() - _BIAS)
    return values.flatten(1)
