"""One immutable segment of trajectories: a zarr v3 group whose arrays are one uncompressed chunk each.

The metadata documents and the chunks are written directly, which any zarr v3 reader opens: the zarr API
takes 18 ms of CPU for a segment of 128 short trajectories, this takes 2. Chunks are read by mapping them.

A segment of N trajectories and T tokens holds `token_ids`, `policy_versions`, `behaviour_logprobs` and
`loss_mask` [T]; `offsets` [N+1], where each trajectory's tokens begin; and `records`, MessagePack of
`{"columns": {field: [N values]}, "checksums": [N]}`. Its group attributes name every file with its size.
"""

import json
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import xxhash
from numpy.typing import NDArray

from bus.errors import StorageError
from bus.messages import Trajectory
from storage.files import publish_files

FORMAT = 1
TOKEN_ARRAYS = {
    "token_ids": "int32",
    "policy_versions": "int32",
    "behaviour_logprobs": "float32",
    "loss_mask": "bool",
}
"""Fields of a trajectory with one value a token, and their zarr data types."""

COLUMNS = tuple(field.name for field in fields(Trajectory) if field.name not in TOKEN_ARRAYS)
"""Fields of a trajectory with one value."""

_REQUIRED = {f.name for f in fields(Trajectory) if f.default is MISSING and f.default_factory is MISSING}
_CHUNK = "c.0"
_REMEDY = "restore it or move the store away"


def write_segment(path: Path, trajectories: Sequence[Trajectory]) -> int:
    """Write the trajectories as a new segment, durable on return; its size in bytes.

    Raises `StorageError` when the disk refuses: then there is no segment."""
    arrays = _token_arrays(trajectories)
    arrays["offsets"] = np.cumsum([0, *(len(t.token_ids) for t in trajectories)], dtype=np.int64)
    arrays["records"] = np.frombuffer(_pack_records(trajectories), np.uint8)
    contents: dict[str, bytes | memoryview] = {}
    for name, array in arrays.items():
        contents[f"{name}/zarr.json"] = _array_document(array)
        contents[f"{name}/{_CHUNK}"] = array.data
    contents["zarr.json"] = _group_document(contents, arrays["records"])
    publish_files(path, contents)
    return sum(map(_size, contents.values()))


def _size(content: bytes | memoryview) -> int:
    return memoryview(content).nbytes


def _group_document(files: dict[str, bytes | memoryview], records: NDArray[np.uint8]) -> bytes:
    attributes = {
        "sluice_replay": FORMAT,
        "files": {name: _size(content) for name, content in files.items()},
        "records_xxh3": xxhash.xxh3_64_hexdigest(records.data),
    }
    return json.dumps({"attributes": attributes, "zarr_format": 3, "node_type": "group"}).encode()


def _token_arrays(trajectories: Sequence[Trajectory]) -> dict[str, NDArray[Any]]:
    return {
        name: np.concatenate([getattr(t, name) for t in trajectories], dtype=dtype, casting="no")
        for name, dtype in TOKEN_ARRAYS.items()
    }


def _pack_records(trajectories: Sequence[Trajectory]) -> bytes:
    columns = {name: [getattr(t, name) for t in trajectories] for name in COLUMNS}
    checksums = [_checksum([getattr(t, name) for name in TOKEN_ARRAYS]) for t in trajectories]
    packed: bytes = msgpack.packb({"columns": columns, "checksums": checksums})
    return packed


def _checksum(arrays: Sequence[NDArray[Any]]) -> int:
    """Of a trajectory's token arrays, in the order of `TOKEN_ARRAYS`."""
    digest = 0
    for array in arrays:
        digest = xxhash.xxh3_64_intdigest(array.data, digest)
    return digest


def _array_document(array: NDArray[Any]) -> bytes:
    """The `zarr.json` of a one-dimensional array in a single uncompressed chunk."""
    codec: dict[str, object] = {"name": "bytes"}
    if array.itemsize > 1:
        codec["configuration"] = {"endian": "little"}
    document = {
        "shape": array.shape,
        "data_type": array.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": array.shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": array.dtype.type(0).item(),
        "codecs": [codec],
        "attributes": {},
        "zarr_format": 3,
        "node_type": "array",
        "storage_transformers": [],
    }
    return json.dumps(document).encode()


@dataclass(frozen=True, slots=True)
class Records:
    """What a segment says of its trajectories apart from their tokens."""

    columns: dict[str, list[Any]]
    """Values of each field, one a trajectory."""
    checksums: list[int]
    size_bytes: int
    """Of the whole segment."""

    def __len__(self) -> int:
        return len(self.checksums)


def read_records(path: Path) -> Records:
    """The records of a segment, which is ours and whole: every file is there and as long as it was.

    Raises `StorageError` naming a segment that is torn, or not one of ours."""
    with _naming(path):
        attributes = _attributes(path)
        for name, expected in attributes["files"].items():
            found = os.stat(f"{path}/{name}").st_size  # noqa: PTH116  # a Path costs more than the call
            if found != expected:
                raise StorageError(f"{path} is torn: {name} has {found} bytes of {expected}; {_REMEDY}")
        return _unpack_records(path, attributes)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Failures to read files of the segment at `path` become a `StorageError` that names it."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path} is torn: {error}; {_REMEDY}") from error


def _attributes(path: Path) -> dict[str, Any]:
    """Of the zarr group, and `size_bytes` of the whole segment."""
    document = (path / "zarr.json").read_bytes()
    try:
        attributes = dict(json.loads(document)["attributes"])
        found = attributes["sluice_replay"]
        attributes["size_bytes"] = len(document) + sum(attributes["files"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"{path} is not a replay segment, by its zarr.json; {_REMEDY}") from error
    if found != FORMAT:
        raise StorageError(
            f"{path} has format {found!r}, this build reads {FORMAT}: use the build that wrote it"
        )
    return attributes


def _unpack_records(path: Path, attributes: dict[str, Any]) -> Records:
    packed = (path / "records" / _CHUNK).read_bytes()
    if xxhash.xxh3_64_hexdigest(packed) != attributes.get("records_xxh3"):
        raise StorageError(f"{path} is corrupt: its records do not match their checksum; {_REMEDY}")
    content = msgpack.unpackb(packed)
    _check_columns(path, content["columns"])
    return Records(content["columns"], content["checksums"], attributes["size_bytes"])


def _check_columns(path: Path, columns: dict[str, list[Any]]) -> None:
    unknown = columns.keys() - set(COLUMNS)
    missing = _REQUIRED - columns.keys() - TOKEN_ARRAYS.keys()
    if unknown or missing:
        names = ", ".join(sorted(unknown or missing))
        problem = "has fields unknown to" if unknown else "lacks fields required by"
        raise StorageError(f"{path} {problem} this build: {names}; use the build that wrote it")


class Segment:
    """A published segment, mapped for reading until `close`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._maps: list[mmap.mmap] = []
        with _naming(path):
            self._records = _unpack_records(path, _attributes(path))
            self._arrays = {name: self._map(name, dtype) for name, dtype in TOKEN_ARRAYS.items()}
            self._offsets = np.frombuffer((path / "offsets" / _CHUNK).read_bytes(), np.int64).tolist()

    def _map(self, name: str, dtype: str) -> NDArray[Any]:
        descriptor = os.open(f"{self._path}/{name}/{_CHUNK}", os.O_RDONLY)
        try:
            mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        except ValueError as error:
            raise StorageError(f"{self._path} is torn: {name} is empty; {_REMEDY}") from error
        finally:
            os.close(descriptor)
        self._maps.append(mapped)
        return np.frombuffer(mapped, dtype, count=len(mapped) // np.dtype(dtype).itemsize)

    def trajectory(self, row: int) -> Trajectory:
        """The row-th trajectory; its arrays are copies, checked against their checksum."""
        start, stop = self._offsets[row : row + 2]
        arrays: dict[str, Any] = {name: array[start:stop].copy() for name, array in self._arrays.items()}
        if _checksum(list(arrays.values())) != self._records.checksums[row]:
            raise StorageError(
                f"{self._path} is corrupt: trajectory {row} does not match its checksum; {_REMEDY}"
            )
        scalars = {name: column[row] for name, column in self._records.columns.items()}
        return Trajectory(**scalars, **arrays)

    def close(self) -> None:
        """Unmap the files."""
        self._arrays.clear()
        for mapped in self._maps:
            mapped.close()
