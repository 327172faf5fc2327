"""Weights with adapters merged into them: each rank makes what it has of them, as it is published."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from learner.backends.contract.backend import ExportedPiece
from learner.backends.shared.lora import PartOfPair
from learner.distributed.process_group import device


def merged_pieces(
    pieces: Sequence[ExportedPiece], pairs: Mapping[str, PartOfPair], scale: float
) -> list[ExportedPiece]:
    """Return this rank's part of the weights so that what it and `pairs` make together is published; these
    are by the weights' names in files."""
    return [
        replace(piece, made=partial(_merged_rows, piece, found, scale)) if found else piece
        for piece in pieces
        for found in [{n: pairs[name] for n, name in enumerate(piece.names) if name in pairs}]
    ]


def _merged_rows(piece: ExportedPiece, pairs: Mapping[int, PartOfPair], scale: float, place: slice) -> Tensor:
    rows = piece.rows[place].to(device(), piece.dtype, copy=True)
    numbers, starts = piece.tensors[place], piece.starts[place]
    for number in pairs.keys() & set(numbers.tolist()):
        [here] = torch.where(numbers == number)
        there = here.to(rows.device)
        rows[there] = pairs[number].merged(rows[there], starts[here], scale)
    return rows
