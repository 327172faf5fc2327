"""The metadata of an array of a hot segment, as zarr v3 has it."""

import json
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray


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
