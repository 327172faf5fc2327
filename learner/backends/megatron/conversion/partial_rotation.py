"""Heads of which the rotary embedding turns the first of several equal pieces.

Hugging Face pairs the two halves of that piece, and leaves the other pieces as they are. In the model the
first halves of all pieces come before all second halves, so that pairs are the halves of the whole head, as
where all of it is rotated; those of other pieces are turned by angles of 0. Queries and keys in the same
order have the same products."""

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor
from transformers import PretrainedConfig

from learner.backends.megatron.conversion.base import QKV, SAME, Layout, Shape

PIECES = {1.0: 1, 0.5: 2, 0.25: 4}
"""Numbers of pieces by the share of a head that is rotated."""


def pieces_of(hf_config: PretrainedConfig) -> int:
    """Return of how many equal pieces of a head the first one is rotated; 1 for shares that are refused."""
    share = (getattr(hf_config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    return PIECES.get(share, 1)


def rotated_qkv(pieces: int) -> Layout:
    """Return the layout of queries, keys and values; gates, if any, lie in the order of their queries."""

    def merge(parts: Sequence[Tensor], shape: Shape) -> Tensor:
        *turned, value = parts
        heads = [_cut(part.contiguous(), 0, len(part) // shape.head_dim) for part in turned]
        ordered = [_halves_apart(head, 1, pieces) for head in heads]
        return QKV.merge(
            [head.reshape(part.shape) for head, part in zip(ordered, turned, strict=True)] + [value], shape
        )

    def split(whole: Tensor, shape: Shape) -> Sequence[Tensor]:
        query, key, value = QKV.split(whole, shape)
        heads = [_cut(part, 1, part.shape[1] // shape.head_dim) for part in (query, key)]
        return [*(halves_together(head, 2, pieces) for head in heads), value]

    return replace(QKV, merge=merge, split=split) if pieces > 1 else QKV


def rotated_norm(pieces: int) -> Layout:
    """Return the layout of the weight by which each query or key is normed."""
    if pieces == 1:
        return SAME
    return Layout(
        merge=lambda parts, _: _halves_apart(parts[0], 0, pieces).reshape(parts[0].shape),
        split=lambda whole, _: [halves_together(whole, 0, pieces)],
        part_shapes=SAME.part_shapes,
    )


def rotated_joint_norm(pieces: int) -> Layout:
    """Return the layout of the weight by which all queries or keys of a token are normed together."""
    if pieces == 1:
        return SAME

    def merge(parts: Sequence[Tensor], shape: Shape) -> Tensor:
        heads = _cut(parts[0], 0, len(parts[0]) // shape.head_dim)
        return _halves_apart(heads, 1, pieces).reshape(parts[0].shape)

    def split(whole: Tensor, shape: Shape) -> Sequence[Tensor]:
        heads = _cut(whole, 0, len(whole) // shape.head_dim)
        return [halves_together(heads, 1, pieces).reshape(whole.shape)]

    return Layout(merge, split, SAME.part_shapes, scattered=True)


def _halves_apart(heads: Tensor, dimension: int, pieces: int) -> Tensor:
    """View heads of width d, along `dimension`, as [2, pieces, d / pieces / 2]."""
    return _cut(heads, dimension, pieces, 2).transpose(dimension, dimension + 1)


def halves_together(heads: Tensor, dimension: int, pieces: int) -> Tensor:
    """Undo it: view heads of the model as [pieces, 2, d / pieces / 2] in the order of files."""
    return _cut(heads, dimension, 2, pieces).transpose(dimension, dimension + 1)


def _cut(values: Tensor, dimension: int, *sizes: int) -> Tensor:
    before, after = values.shape[:dimension], values.shape[dimension + 1 :]
    return values.view(*before, *sizes, values.shape[dimension] // math.prod(sizes), *after)
