"""Arrays of segments as zarr has them: uncompressed in a hot segment, in compressed chunks in merged and
archived ones.

A hot segment is written uncompressed and mapped, since it is read soon and often. What is merged or archived
is kept for longer: zarr's sharding codec (zarr v3 specification, `sharding_indexed`) puts an array's
compressed chunks and their index into one object, of which a reader decodes the chunks that it needs."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import zarr

CHUNK_ROWS = 1 << 16
"""Rows of an array that are compressed together: some hundred kilobytes, decoded in about a millisecond."""
DECODED_CHUNKS = 2
"""Chunks of each array that a reader keeps decoded: a group lies together, and a step's groups often do."""


def array_document(parts: Sequence[NDArray[Any]]) -> bytes:
    """Return the `zarr.json` of an array in a single uncompressed chunk, of which these are the parts."""
    codec: dict[str, object] = {"name": "bytes"}
    if parts[0].itemsize > 1:
        codec["configuration"] = {"endian": "little"}
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    document = {
        "shape": shape,
        "data_type": parts[0].dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": parts[0].dtype.type(0).item(),
        "codecs": [codec],
        "attributes": {},
        "zarr_format": 3,
        "node_type": "array",
        "storage_transformers": [],
    }
    return json.dumps(document).encode()


def compressed_group(arrays: Mapping[str, NDArray[Any]], attributes: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files of a zarr v3 group of these arrays, by name.

    Each array is one shard whose chunks are shuffled by bytes and compressed by zstd, which keeps every bit.
    """
    import zarr  # a third of a second, and a process without merged segments never needs it
    from zarr.codecs import BloscCodec
    from zarr.storage import MemoryStore

    files: dict[str, Any] = {}
    group = zarr.create_group(MemoryStore(files), attributes=dict(attributes))
    for name, values in arrays.items():
        chunk = (CHUNK_ROWS, *values.shape[1:])
        shard = (max(1, -(-len(values) // CHUNK_ROWS)) * CHUNK_ROWS, *values.shape[1:])
        array = group.create_array(
            name, shape=values.shape, dtype=values.dtype, chunks=chunk, shards=shard,
            compressors=BloscCodec(cname="zstd", clevel=1, shuffle="shuffle", typesize=values.itemsize),
        )  # fmt: skip
        array[:] = values
    return {name: buffer.to_bytes() for name, buffer in files.items()}


def open_compressed(files: Mapping[str, memoryview]) -> "zarr.Group":
    """Open the group whose files are given; nothing is copied before it is decoded."""
    import zarr
    from zarr.core.buffer import cpu
    from zarr.storage import MemoryStore

    buffers: dict[str, Any] = {
        name: cpu.Buffer.from_array_like(np.frombuffer(content, np.uint8)) for name, content in files.items()
    }
    return zarr.open_group(MemoryStore(buffers), mode="r")


class CompressedArray:
    """One array of a compressed group, read in slices; the chunks that were used last stay decoded."""

    def __init__(self, array: "zarr.Array[Any]") -> None:
        self._array = array
        self._decoded: dict[int, NDArray[Any]] = {}

    def __len__(self) -> int:
        return int(self._array.shape[0])

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        """Return a copy of these rows."""
        begin, end, _ = rows.indices(len(self))
        if begin >= end:
            return np.empty((0, *self._array.shape[1:]), self._array.dtype)
        first, last = begin // CHUNK_ROWS, (end - 1) // CHUNK_ROWS
        parts = [self._chunk(number) for number in range(first, last + 1)]
        begin, end = begin - first * CHUNK_ROWS, end - first * CHUNK_ROWS
        if len(parts) == 1:
            return parts[0][begin:end].copy()
        return np.concatenate(parts)[begin:end]

    def decoded(self) -> NDArray[Any]:
        """Return all rows."""
        return np.asarray(self._array[:])

    def _chunk(self, number: int) -> NDArray[Any]:
        found = self._decoded.pop(number, None)
        if found is None:
            found = np.asarray(self._array[number * CHUNK_ROWS : (number + 1) * CHUNK_ROWS])
            if len(self._decoded) >= DECODED_CHUNKS:
                del self._decoded[next(iter(self._decoded))]
        self._decoded[number] = found  # now the last to be forgotten
        return found
