"""Quantises the tensors of a version on the host, in threads."""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor
from itertools import chain

import numpy as np

from bus.errors import StorageError
from storage.weights.fp8 import Blocks, Codes, Floats, codes_of, encoded, largest_magnitudes, scales_of
from storage.weights.int4 import GROUP, PACKED_COLUMNS, group_scales, largest_of_groups, packed
from storage.weights.quantisation import (
    BLOCK,
    BLOCKS,
    PACKED,
    SHAPE,
    TENSOR_SCALE,
    FileFormat,
    Fp8Format,
    Int4Format,
    is_quantised,
)
from storage.weights.tensors import HostTensor, Words, in_order, widened

Kind = tuple[str, tuple[int, ...]]
"""Name of a dtype in safetensors, and a shape."""
TASK_ELEMENTS = 1 << 23
"""Elements that a thread takes at a time: large models have millions of blocks, and tasks cost the main
thread."""


def _band(tensor: HostTensor, start: int) -> Floats:
    return widened(tensor.words.reshape(tensor.shape)[start : start + BLOCK], tensor.dtype)


class _Fp8Job:
    def __init__(self, name: str, tensor: HostTensor, found: Fp8Format) -> None:
        self.name, self.tensor, self.format = name, tensor, found
        rows, self.width = tensor.shape
        self.codes: Codes = np.empty((rows, self.width), np.uint8)
        self.bands = range(0, rows, BLOCK)
        self.scales: Floats = np.empty(0, np.float32)
        """[rows of blocks, columns of blocks], the same in all of them where the tensor has one."""

    def largest(self, start: int) -> Floats:
        return largest_magnitudes(_band(self.tensor, start), BLOCK)

    def set_scales(self, largest: list[Floats]) -> None:
        magnitudes = np.stack(largest)
        _refuse_infinite(self.name, magnitudes, BLOCKS)
        if not self.format.by_block:
            magnitudes = np.full_like(magnitudes, magnitudes.max())
        self.scales = scales_of(magnitudes, powers_of_two=self.format.powers_of_two)

    def encode(self, start: int) -> None:
        scales = self.scales[start // BLOCK]
        self.codes[start : start + BLOCK] = encoded(_band(self.tensor, start), scales, BLOCK)

    def words(self) -> dict[str, Words]:
        scales = self.scales if self.format.by_block else self.scales[:1, :1]
        flat = np.ascontiguousarray(scales).reshape(-1).view(np.uint32)
        return {"": self.codes.reshape(-1), self.format.suffix: flat}


class _Int4Job:
    def __init__(self, name: str, tensor: HostTensor) -> None:
        self.name, self.tensor = name, tensor
        rows, self.width = tensor.shape
        self.packed = np.empty((rows, self.width // PACKED_COLUMNS), np.uint32)
        self.bands = range(0, rows, BLOCK)
        self.scales: Words = np.empty(0, np.uint32)
        """[rows, groups], words of the weight's dtype."""

    def largest(self, start: int) -> Floats:
        return largest_of_groups(_band(self.tensor, start))

    def set_scales(self, largest: list[Floats]) -> None:
        magnitudes = np.concatenate(largest)
        _refuse_infinite(self.name, magnitudes, Blocks(1, GROUP))
        self.scales = group_scales(magnitudes, self.tensor.dtype)

    def encode(self, start: int) -> None:
        rows = slice(start, start + BLOCK)
        self.packed[rows] = packed(_band(self.tensor, start), widened(self.scales[rows], self.tensor.dtype))

    def words(self) -> dict[str, Words]:
        shape = np.array(self.tensor.shape, np.int64).view(np.uint64)
        return {PACKED: self.packed.reshape(-1), TENSOR_SCALE: self.scales.reshape(-1), SHAPE: shape}


class _ChannelJob:
    def __init__(self, name: str, tensor: HostTensor) -> None:
        self.name, self.tensor = name, tensor
        rows, self.width = tensor.shape
        self.codes: Codes = np.empty((rows, self.width), np.uint8)
        self.bands = range(0, rows, BLOCK)
        self.scales: Floats = np.empty(0, np.float32)
        """[rows, 1]."""

    def largest(self, start: int) -> Floats:
        found: Floats = np.abs(_band(self.tensor, start)).max(axis=1, keepdims=True)
        return found

    def set_scales(self, largest: list[Floats]) -> None:
        magnitudes = np.concatenate(largest)
        _refuse_infinite(self.name, magnitudes, Blocks(1, self.width))
        self.scales = scales_of(magnitudes, powers_of_two=False)

    def encode(self, start: int) -> None:
        rows = slice(start, start + BLOCK)
        self.codes[rows] = codes_of(_band(self.tensor, start) / self.scales[rows])

    def words(self) -> dict[str, Words]:
        return {"": self.codes.reshape(-1), TENSOR_SCALE: self.scales.reshape(-1).view(np.uint32)}


_Job = _Fp8Job | _Int4Job | _ChannelJob


def _job(name: str, tensor: HostTensor, found: FileFormat) -> _Job:
    if isinstance(found, Fp8Format):
        return _Fp8Job(name, tensor, found)
    return _Int4Job(name, tensor) if isinstance(found, Int4Format) else _ChannelJob(name, tensor)


def _refuse_infinite(name: str, magnitudes: Floats, blocks: Blocks) -> None:
    if not np.isfinite(magnitudes).all():
        row, column = np.argwhere(~np.isfinite(magnitudes))[0] * (blocks.rows, blocks.columns)
        raise StorageError(
            f"{name} has values that are not finite, in the block that begins at row {row}, column {column}: "
            "codes have no infinity, and the model cannot be used with them in any format"
        )


def _tasks(jobs: Iterable[_Job], size: int) -> Iterator[list[tuple[_Job, int]]]:
    """Yield rows of blocks, as jobs and where they start, in order: `size` elements or a little more."""
    task: list[tuple[_Job, int]] = []
    elements = 0
    for job in jobs:
        for start in job.bands:
            task.append((job, start))
            elements += BLOCK * job.width
            if elements >= size:
                yield task
                task, elements = [], 0
    if task:
        yield task


def _encode(task: Iterable[tuple[_Job, int]]) -> None:
    for job, start in task:
        job.encode(start)


def quantised(
    tensors: Mapping[str, HostTensor], found: FileFormat, threads: Executor | None = None, *,
    task_elements: int | None = None,
) -> dict[str, HostTensor]:  # fmt: skip
    """Return the tensors with codes and scales in the place of each weight that is quantised.

    The others are shared. `threads` take `task_elements` at a time, or `TASK_ELEMENTS`. Raises `StorageError`
    for a weight that is not finite."""
    jobs = {
        name: _job(name, tensor, found)
        for name, tensor in tensors.items()
        if is_quantised(name, tensor.shape) and len(tensor.words)
    }
    tasks = list(_tasks(jobs.values(), task_elements or TASK_ELEMENTS))
    found_largest = in_order(threads, lambda task: [job.largest(start) for job, start in task], tasks)
    largest = chain.from_iterable(found_largest)
    for job in jobs.values():
        job.set_scales([next(largest) for _ in job.bands])
    for _ in in_order(threads, _encode, tasks):
        pass
    result: dict[str, HostTensor] = {}
    for name, tensor in tensors.items():
        if name not in jobs:
            result[name] = tensor
            continue
        words = jobs[name].words()
        for end, (dtype, shape) in found.stored(tensor.shape, tensor.dtype).items():
            result[name + end] = HostTensor(dtype, shape, words[end])
    return result


def quantised_kinds(kinds: Mapping[str, Kind], found: FileFormat) -> dict[str, Kind]:
    """Return the kinds of the tensors that `quantised` makes of tensors of these kinds."""
    result: dict[str, Kind] = {}
    for name, (dtype, shape) in kinds.items():
        if is_quantised(name, shape) and all(shape):
            result |= {name + end: kind for end, kind in found.stored(shape, dtype).items()}
        else:
            result[name] = dtype, shape
    return result
