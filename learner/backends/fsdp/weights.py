"""Loads weights into a sharded model and takes them out, by the names that model files have.

Each rank reads its rows of each tensor, and of safetensors files nothing else; only what files divide, as
experts, it reads as a whole. On the way out one tensor at a time is whole."""

from collections.abc import Iterator, Mapping
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from bus.errors import ConfigError, listed
from bus.process.work_progress import tracked
from learner.backends.contract.backend import ExportedPiece
from learner.backends.fsdp.names import FileNames
from learner.distributed.process_group import device, gathered
from learner.model_directories.lazy_weights import State, misfits, part_of
from storage.model_files.finite_weights import refuse_not_finite


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a parameter, or a buffer, without gradient and without a copy."""
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor.detach()


def first_row(tensor: Tensor) -> int:
    """Return the row of the whole tensor at which this rank's part begins."""
    if not isinstance(tensor, DTensor):
        return 0
    rows = -(-tensor.shape[0] // dist.get_world_size())  # as torch.chunk cuts them
    return min(rows * dist.get_rank(), tensor.shape[0])


@torch.no_grad()
def load_weights(tensors: Mapping[str, Tensor], names: FileNames, state: State) -> None:
    """Copy this rank's part of `state` into the `tensors` of its model, converting to their dtype and device.

    Raises `ConfigError` with all names that are missing, unexpected or of another shape, on every rank alike;
    the model is then unchanged. Every rank calls this."""
    problems = {
        problem
        for of_rank in gathered(list(misfits(names.files, state, names.is_ignored)))
        for problem in of_rank
    }
    if problems:
        raise ConfigError(f"these weights do not fit the model:\n{listed(sorted(problems))}")
    for name, tensor in tracked(tensors.items(), "loading the weights"):
        mine, of_tensor = local(tensor), names.tensors[name]
        if not mine.numel():
            continue
        if not isinstance(tensor, DTensor):  # a buffer, which may be a scalar
            mine.copy_(names.merge(name, state))
            continue
        start, stop = first_row(tensor), first_row(tensor) + len(mine)
        if of_tensor.is_as_in_files:
            mine.copy_(part_of(state, next(iter(of_tensor.files)), 0, start, stop))
        else:
            mine.copy_(names.merge(name, state)[start:stop])
    mine_by_name = ((name, local(each)) for name, each in tensors.items() if isinstance(each, DTensor))
    refuse_not_finite(mine_by_name, "the model")


@torch.no_grad()
def stream_weights(
    tensors: Mapping[str, Tensor], names: FileNames, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights by their names in files on rank 0, as `dtype`, each good until the next.

    Every rank must exhaust this iterator; it yields nothing on the others. Buffers keep their dtype."""
    for name, tensor in tensors.items():
        found = whole(tensor, dtype) if isinstance(tensor, DTensor) else tensor.detach()
        if dist.get_rank() == 0:
            yield from names.split(name, found).items()


def whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Gather a tensor on every rank. Every rank calls this."""
    mine = local(tensor).to(device(), dtype)
    if dist.get_world_size() == 1:
        return mine
    rows = -(-tensor.shape[0] // dist.get_world_size())
    padded = mine.new_zeros(rows, *tensor.shape[1:])
    padded[: len(mine)] = mine
    whole = mine.new_empty(dist.get_world_size(), *padded.shape)
    dist.all_gather(list(whole), padded)
    return whole.flatten(0, 1)[: tensor.shape[0]]


def whole_here(tensors: Mapping[str, Tensor], names: FileNames) -> dict[str, Tensor]:
    """Return views of all weights by their names in files, where one rank has the model alone.

    Only for float32 activations: else the published weights would not be those that are computed with.
    Tensors whose parts in files are no views are left out."""
    views: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        mine = local(tensor)
        parts = names.split(name, mine)
        pointer = mine.untyped_storage().data_ptr()
        are_views = all(part.untyped_storage().data_ptr() == pointer for part in parts.values())
        if are_views and all(part.is_contiguous() for part in parts.values()):
            views |= parts
    return views


def exported_pieces(
    tensors: Mapping[str, Tensor], names: FileNames, dtype: torch.dtype
) -> Iterator[ExportedPiece]:
    """Yield this rank's rows of each weight, computed with in `dtype`; those of buffers, which every rank
    has, on rank 0."""
    for name, tensor in tensors.items():
        mine, files = local(tensor), names.tensors[name].files
        if not mine.numel() or not (isinstance(tensor, DTensor) or dist.get_rank() == 0):
            continue
        width, numbers, starts = _places(name, tuple(tensor.shape), names)
        first = first_row(tensor) * (len(starts) // tensor.shape[0] if tensor.dim() else 1)
        rows = mine.view(-1, width)
        place = slice(first, first + len(rows))
        computed = dtype if isinstance(tensor, DTensor) else tensor.dtype
        yield ExportedPiece(rows, computed, tuple(files), numbers[place], starts[place])


def _places(name: str, shape: tuple[int, ...], names: FileNames) -> tuple[int, Tensor, Tensor]:
    """Return the width of the longest rows of a tensor of the model that files have in one piece, and in
    which of its tensors in files, and where there, each row begins.

    Files divide and turn most tensors by rows, and what is done to numbers of rows says how."""
    files = names.tensors[name].files
    width = prod(shape[-1:]) if len(shape) > 1 else 1
    if names.tensors[name].is_as_in_files:
        starts = torch.arange(prod(shape) // width) * width
        return width, torch.zeros_like(starts), starts
    found = names.split(name, torch.arange(prod(shape[:-1])).view(*shape[:-1], 1))
    if any(tuple(part.shape) != (*files[file][:-1], 1) for file, part in found.items()):
        width, found = 1, names.split(name, torch.arange(prod(shape)).view(shape))
    numbers, starts = (torch.empty(prod(shape) // width, dtype=torch.int64) for _ in range(2))
    for number, file in enumerate(files):
        rows = found[file].flatten()
        numbers[rows] = number
        starts[rows] = torch.arange(len(rows)) * width
    return width, numbers, starts
