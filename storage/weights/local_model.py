"""Takes parts of published weights from a model's directory on this host, as far as their digests agree."""

import json
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import structlog

from bus.errors import StorageError
from bus.messages import BlobRef
from storage.weights.blob_parts import is_part, part_range
from storage.weights.tensors import spare_threads

log = structlog.get_logger()
TRIED = 8
"""Parts of which one at least has to agree, or the others are not looked at."""


class Tensor(NamedTuple):
    """Place of a tensor in a safetensors file."""

    dtype: str
    start: int
    end: int


def tensors_of(header: bytes) -> dict[str, Tensor]:
    """Return the places of tensors from the beginning of a safetensors file, its header included. Raises
    `StorageError` when it is malformed."""
    try:
        found = json.loads(header[8:])
        found.pop("__metadata__", None)
        return {
            name: Tensor(str(one["dtype"]), *(len(header) + int(at) for at in one["data_offsets"]))
            for name, one in found.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StorageError(f"these {len(header)} bytes are no header of safetensors: {error!r}") from error


def read_header(file: int) -> bytes:
    """Return the beginning of an open safetensors file, its header included."""
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    return os.pread(file, 8 + min(length, os.fstat(file).st_size), 0)


def names_in(path: Path) -> list[str]:
    """Return the names of the tensors in a safetensors file. Raises `StorageError` when it is malformed or
    has lost its end."""
    with path.open("rb") as file:
        found = tensors_of(read_header(file.fileno()))
    if max((tensor.end for tensor in found.values()), default=0) > path.stat().st_size:
        raise StorageError(f"{path} ends before the tensors that its header names")
    return list(found)


def take_parts(directory: Path, ref: BlobRef, header: bytes, data: memoryview) -> set[int]:
    """Fill in parts of the weights `ref`, which begin with `header`, from the files of the directory.

    Returns those that are in `data` then and have their digests. Raises `StorageError` where there is no
    directory and for files that are no safetensors, `OSError` for such as cannot be read."""
    if not directory.is_dir():
        raise StorageError(f"there is no directory {directory} on this host")
    with ExitStack() as opened:
        source = _Source(directory, header, opened)
        if not source.same:
            return set()
        found: set[int] = set()
        with ThreadPoolExecutor(spare_threads(), "model") as threads:
            for begin in range(0, ref.parts, TRIED):
                parts = range(begin, min(begin + TRIED, ref.parts))
                agree = list(threads.map(lambda part: source.fill(ref, part, data), parts))
                found |= {part for part, agrees in zip(parts, agree, strict=True) if agrees}
                if not found:
                    break
        log.info("weights_found_in_directory", directory=str(directory), parts=len(found), of=ref.parts)
        return found


class _Source:
    def __init__(self, directory: Path, header: bytes, opened: ExitStack) -> None:
        self._header = header
        here: dict[str, tuple[int, Tensor]] = {}
        for path in sorted(directory.glob("*.safetensors")):
            file = os.open(path, os.O_RDONLY)
            opened.callback(os.close, file)
            here |= {name: (file, tensor) for name, tensor in tensors_of(read_header(file)).items()}
        wanted = sorted(tensors_of(header).items(), key=lambda item: item[1].start)
        self._wanted = [tensor for _, tensor in wanted]
        self._sources = [_same(here, name, tensor) for name, tensor in wanted]
        self.same = any(source is not None for source in self._sources)
        """Whether any tensor has the same name, dtype and size."""

    def fill(self, ref: BlobRef, part: int, data: memoryview) -> bool:
        begin, end = part_range(ref, part)
        if begin < len(self._header):
            upto = min(end, len(self._header))
            data[begin:upto] = self._header[begin:upto]
        for tensor, (file, start) in self._between(begin, end):
            first, last = max(begin, tensor.start), min(end, tensor.end)
            os.preadv(file, [data[first:last]], start + first - tensor.start)
        return is_part(ref, part, data[begin:end])

    def _between(self, begin: int, end: int) -> Iterator[tuple[Tensor, tuple[int, int]]]:
        first = max(0, bisect_right(self._wanted, begin, key=lambda tensor: tensor.start) - 1)
        for tensor, source in zip(self._wanted[first:], self._sources[first:], strict=True):
            if tensor.start >= end:
                return
            if source is not None and tensor.end > begin:
                yield tensor, source


def _same(here: Mapping[str, tuple[int, Tensor]], name: str, wanted: Tensor) -> tuple[int, int] | None:
    if name not in here:
        return None
    file, tensor = here[name]
    same = tensor.dtype == wanted.dtype and tensor.end - tensor.start == wanted.end - wanted.start
    return (file, tensor.start) if same else None
