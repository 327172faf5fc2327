"""One immutable segment of trajectories: a zarr v3 group in one zip file, which zarr's `ZipStore` opens.

A hot segment's arrays are one uncompressed chunk each, written directly: the zarr API takes 18 ms of CPU for
a segment of 128 short trajectories, this takes 2. Its chunks are read by mapping the file. The arrays of a
merged or archived segment are compressed and sharded by zarr (storage/store/segment_arrays.py).

A segment of N trajectories and T tokens holds `token_ids`, `policy_versions`, `behaviour_logprobs` and
`loss_mask` [T]; `records` [bytes], a MessagePack list of its other fields for each trajectory; and `rows`
[N, 6], whose columns `ROW_COLUMNS` names. Where trajectories have images, it holds the encoded bytes of each
once (storage/store/image_blobs.py)."""

import json
import struct
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import MISSING, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import xxhash
from numpy.typing import NDArray

from bus.codec import fast_constructor
from bus.errors import LostDataError, StorageError
from bus.trajectory import Parent, Trajectory, Turn
from storage.disk.atomic_files import Content, publish_files
from storage.store.image_blobs import IMAGE_ARRAYS, ImageBlobs, KnownImages, blobs_of, joined_blobs
from storage.store.index import Columns
from storage.store.segment_arrays import CompressedArray, array_document, compressed_group, open_compressed
from storage.store.zip_files import map_entries, zipped

if TYPE_CHECKING:
    import zarr

FORMAT = 4
"""Format 3 lacked a trajectory's episode, turns and end; 2 was the same group as a directory of files."""
FILE = "group.zip"
TOKEN_ARRAYS = {
    "token_ids": "int32",
    "policy_versions": "int32",
    "behaviour_logprobs": "float32",
    "loss_mask": "bool",
}
"""Fields of a trajectory with one value a token, and their zarr data types."""
RECORD_FIELDS = tuple(field.name for field in fields(Trajectory) if field.name not in TOKEN_ARRAYS)
"""Fields of a trajectory with one value."""
ROW_COLUMNS = ("tokens_end", "record_end", "lease_id", "sample", "group_size", "checksum")
"""Where a trajectory's tokens and record end, whose it is, and the xxh3-64 of its arrays and its record."""
_REQUIRED = {f.name for f in fields(Trajectory) if f.default is MISSING and f.default_factory is MISSING}
_DTYPES = {**TOKEN_ARRAYS, **IMAGE_ARRAYS, "records": "uint8", "rows": "int64"}
_DOCUMENT = "zarr.json"
_CHUNK = "c.0"
_ROWS_CHUNK = "c.0.0"
_REMEDY = "restore it or move the store away"
_make: Callable[..., Trajectory] = fast_constructor(Trajectory, *RECORD_FIELDS, *TOKEN_ARRAYS)
_TURNS, _PARENT, _IMAGES = (RECORD_FIELDS.index(name) for name in ("turns", "parent", "images"))
_UINT64 = (1 << 64) - 1
_NO_RECORDS = np.empty(0, np.uint8)
_TWO_ROWS = struct.Struct(f"={2 * len(ROW_COLUMNS)}q")
"""A row and the one before, where it begins: unpacking takes half the time of a slice of an array."""
_ROW_BYTES = _TWO_ROWS.size // 2
Arrays = dict[str, list[NDArray[Any]]]
"""Arrays by name, in parts that follow one another."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What a segment says of itself."""

    trajectories: int
    size_bytes: int
    written_s: float
    """When the segment's newest trajectory was written, in seconds since the epoch."""
    record_fields: list[str]
    """What the longest of the records holds."""
    rows_xxh3: str
    compressed: bool
    """Whether zarr wrote it, compressed; a hot segment is mapped."""
    run: str = ""
    """Identity of the run; empty where older builds wrote it, or older actors sent what is in it."""


def write_segment(path: Path, trajectories: Sequence[Trajectory]) -> Summary:
    """Write the trajectories as a new segment, durable on return. Raises `StorageError` when the disk
    refuses: then there is no segment."""
    arrays: Arrays = {  # joined: handing out the memory of each small array takes longer than copying it
        name: [np.concatenate([getattr(t, name) for t in trajectories], dtype=dtype)]
        for name, dtype in TOKEN_ARRAYS.items()
    }
    records = [
        _pack([getattr(t, name) for name in RECORD_FIELDS]) for t in map(_without_images, trajectories)
    ]
    arrays["records"] = [np.frombuffer(b"".join(records), np.uint8)]
    rows = np.empty((len(trajectories), len(ROW_COLUMNS)), np.int64)
    rows[:, 0] = np.cumsum([len(t.token_ids) for t in trajectories])
    rows[:, 1] = np.cumsum([len(record) for record in records])
    rows[:, 2:5] = [(t.lease_id, t.sample, t.group_size) for t in trajectories]
    rows[:, 5].view(np.uint64)[:] = [
        _checksum([getattr(t, name) for name in TOKEN_ARRAYS], record)
        for t, record in zip(trajectories, records, strict=True)
    ]
    arrays["rows"] = [rows]
    arrays |= {name: [array] for name, array in blobs_of(trajectories).items()}
    run = next((t.run for t in trajectories if t.run), "")
    return _write(path, arrays, record_fields=RECORD_FIELDS, written_s=time.time(), run=run)


def merge_segments(path: Path, merged: Sequence[Path]) -> Summary:
    """Write the trajectories of these segments, in order, as one compressed segment; each keeps every bit.
    Raises `StorageError` when the disk refuses, or one of them is torn: then there is no segment."""
    attributes, file = compress_segments(merged)
    publish_files(path, {FILE: file})
    return _summarise(attributes, sum(map(len, file)))


def compressed_file(path: Path) -> Content:
    """Return the file of the compressed segment with these trajectories, in parts. Raises `StorageError` when
    the segment is torn."""
    if check_segment(path).compressed:
        return [(path / FILE).read_bytes()]
    return compress_segments([path])[1]


def check_trajectories(path: Path) -> None:
    """Raise `StorageError` naming a segment of which a trajectory does not match its checksum."""
    with closing(Segment(path)) as segment:
        for row in range(segment.summary.trajectories):
            segment.trajectory(row)


def compress_segments(merged: Sequence[Path]) -> tuple[dict[str, Any], Content]:
    """Return what the compressed segment of these says of itself, and its file. Raises `StorageError` when
    one of them is torn."""
    with ExitStack() as opened:
        segments = [opened.enter_context(closing(Segment(segment))) for segment in merged]
        arrays = {
            name: np.concatenate([segment.decoded(name) for segment in segments])
            for name in (*TOKEN_ARRAYS, "records")
        }
        arrays |= joined_blobs([segment.images for segment in segments])
        rows = [segment.rows.copy() for segment in segments]
        summaries = [segment.summary for segment in segments]
    for column in (0, 1):
        for before, after in pairwise(rows):
            after[:, column] += before[-1, column]
    arrays["rows"] = np.concatenate(rows)
    attributes = _attributes(
        arrays["rows"],
        record_fields=max((summary.record_fields for summary in summaries), key=len),
        written_s=max(summary.written_s for summary in summaries),
        compressed=True,
        run=next((summary.run for summary in summaries if summary.run), ""),
    )
    return attributes, zipped({name: [data] for name, data in compressed_group(arrays, attributes).items()})


def _attributes(
    rows: NDArray[np.int64], *, record_fields: Sequence[str], written_s: float, compressed: bool, run: str
) -> dict[str, Any]:
    return {
        "sluice_replay": FORMAT,
        "record_fields": record_fields,
        "trajectories": len(rows),
        "rows_xxh3": xxhash.xxh3_64_hexdigest(np.ascontiguousarray(rows).data),
        "written_s": written_s,
        "compressed": compressed,
        "run": run,
    }


def _write(
    path: Path, arrays: Arrays, *, record_fields: Sequence[str], written_s: float, run: str
) -> Summary:
    [rows] = arrays["rows"]
    attributes = _attributes(
        rows, record_fields=record_fields, written_s=written_s, compressed=False, run=run
    )
    document = json.dumps({"attributes": attributes, "zarr_format": 3, "node_type": "group"}).encode()
    contents: dict[str, Content] = {_DOCUMENT: [document]}
    for name, parts in arrays.items():
        contents[f"{name}/{_DOCUMENT}"] = [array_document(parts)]
        contents[_chunk(name)] = [part.data for part in parts]
    file = zipped(contents)
    publish_files(path, {FILE: file})
    return _summarise(attributes, sum(map(len, file)))


def _chunk(name: str) -> str:
    return f"{name}/{_ROWS_CHUNK if name in ('rows', 'image_rows') else _CHUNK}"


_pack: Callable[[list[Any]], bytes] = msgpack.packb


def _without_images(trajectory: Trajectory) -> Trajectory:
    if not trajectory.images:
        return trajectory
    return replace(trajectory, images=tuple(image._replace(data=b"") for image in trajectory.images))


def _checksum(arrays: Sequence[NDArray[Any]], record: bytes | memoryview) -> int:
    digest = xxhash.xxh3_64_intdigest(record)
    for array in arrays:
        digest = xxhash.xxh3_64_intdigest(array, digest)  # type: ignore[arg-type]  # an array is a buffer
    return digest


def check_segment(path: Path) -> Summary:
    """Return what a segment says of itself, which is ours and whole: a zip file ends with the list of its
    entries.

    Raises `StorageError` naming a segment that is torn, or not one of ours."""
    with _naming(path):
        return _summary(path, _entries(path))


def read_columns(path: Path) -> Columns:
    """Return whose trajectories a segment holds. Raises `StorageError` naming a torn or corrupt one."""
    with _naming(path):
        entries = _entries(path)
        summary = _summary(path, entries)
        rows = _rows(path, _array(entries, _group(entries, summary), "rows"), summary)
    samples, group_sizes = rows[1:, 3].astype(np.int32), rows[1:, 4].astype(np.int32)
    return Columns(rows[1:, 2].copy(), samples, group_sizes, np.diff(rows[:, 0]).astype(np.int32))


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Failures to read the segment at `path` become a `StorageError` that names it."""
    try:
        yield
    except FileNotFoundError as error:
        raise LostDataError(f"{path} is torn: {error}; {_REMEDY}") from error
    except OSError as error:  # such as too many open files: another attempt may succeed
        raise StorageError(f"{path} cannot be read: {error}; {_REMEDY}") from error
    except (KeyError, RuntimeError, zipfile.BadZipFile) as error:  # RuntimeError: it does not decode
        raise LostDataError(f"{path} is torn: {error}; {_REMEDY}") from error


def _entries(path: Path) -> dict[str, memoryview]:
    """Return the files of the group, mapped; of one that is not in a zip file only what says what it is."""
    if (path / FILE).exists():
        return map_entries(path / FILE)
    return {_DOCUMENT: memoryview((path / _DOCUMENT).read_bytes())}


def _summary(path: Path, entries: Mapping[str, memoryview]) -> Summary:
    try:
        attributes = json.loads(bytes(entries[_DOCUMENT]))["attributes"]
        found = attributes["sluice_replay"]
    except (ValueError, KeyError, TypeError) as error:
        raise LostDataError(f"{path} is not a replay segment, by its zarr.json; {_REMEDY}") from error
    if found != FORMAT:
        raise LostDataError(
            f"{path} has format {found!r}, this build reads {FORMAT}: go on with the build that wrote it, or "
            "begin a new run (--run with another name, or move the run's directory away)"
        )
    try:
        _check_fields(path, attributes["record_fields"])
        return _summarise(attributes, (path / FILE).stat().st_size)
    except (KeyError, TypeError) as error:
        raise LostDataError(f"{path} is corrupt: its zarr.json lacks {error}; {_REMEDY}") from error


def _check_fields(path: Path, found: Sequence[str]) -> None:
    """Fields are only ever added, at the end and with a default: a record that lacks some is older."""
    if found != list(RECORD_FIELDS[: len(found)]) or _REQUIRED - {*found, *TOKEN_ARRAYS}:
        raise LostDataError(
            f"{path} has the fields {', '.join(found)}, this build {', '.join(RECORD_FIELDS)}: use the build "
            "that wrote it"
        )


def _summarise(attributes: dict[str, Any], size_bytes: int) -> Summary:
    return Summary(
        trajectories=attributes["trajectories"],
        size_bytes=size_bytes,
        written_s=attributes["written_s"],
        record_fields=attributes["record_fields"],
        rows_xxh3=attributes["rows_xxh3"],
        compressed=attributes["compressed"],
        run=attributes.get("run", ""),
    )


def _group(entries: Mapping[str, memoryview], summary: Summary) -> "zarr.Group | None":
    return open_compressed(entries) if summary.compressed else None


def _array(
    entries: Mapping[str, memoryview], group: "zarr.Group | None", name: str
) -> NDArray[Any] | CompressedArray:
    if group is None:
        return np.frombuffer(entries[_chunk(name)], _DTYPES[name])
    return CompressedArray(group[name])


def _decoded(array: NDArray[Any] | CompressedArray) -> NDArray[Any]:
    return array.decoded() if isinstance(array, CompressedArray) else array


def _rows(path: Path, rows: NDArray[Any] | CompressedArray, summary: Summary) -> NDArray[np.int64]:
    """Return the array `rows` after a row of zeros, where the first trajectory begins."""
    content = _decoded(rows).tobytes()
    if xxhash.xxh3_64_hexdigest(content) != summary.rows_xxh3:
        raise LostDataError(f"{path} is corrupt: its rows do not match their checksum; {_REMEDY}")
    return np.frombuffer(bytes(8 * len(ROW_COLUMNS)) + content, np.int64).reshape(-1, len(ROW_COLUMNS))


class Segment:
    """A published segment, mapped for reading until `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._arrays: dict[str, NDArray[Any] | CompressedArray] = {}
        """Views of the mapped chunks, or readers of compressed ones, by name."""
        with _naming(path):
            entries = _entries(path)
            self.summary = _summary(path, entries)
            group = _group(entries, self.summary)
            self._rows = _rows(path, _array(entries, group, "rows"), self.summary)
            for name in (*TOKEN_ARRAYS, "records"):
                self._arrays[name] = _array(entries, group, name)
            self.images = ImageBlobs(path)
            if any(name.startswith("image_rows/") for name in entries):
                images, table = (_array(entries, group, name) for name in IMAGE_ARRAYS)
                self.images = ImageBlobs(path, images, _decoded(table).reshape(-1, 3))
        self._tokens = tuple(self._arrays[name] for name in TOKEN_ARRAYS)
        self._records = self._arrays["records"]
        self._row_bytes = self._rows.data.cast("B")

    @property
    def rows(self) -> NDArray[np.int64]:
        """Return the array `rows`, [N, 6]."""
        return self._rows[1:]

    @property
    def leases(self) -> NDArray[np.int64]:
        return self._rows[1:, ROW_COLUMNS.index("lease_id")]

    def decoded(self, name: str) -> NDArray[Any]:
        """Return all of an array of tokens or records; a view of the mapped file is good until `close`.
        Raises `StorageError` when its compressed bytes changed."""
        with _naming(self.path):
            return _decoded(self._arrays[name])

    def trajectory(self, row: int, *, copied: bool = False, known: KnownImages | None = None) -> Trajectory:
        """Return the row-th trajectory. Its arrays, views of the mapped files or copies, match their
        checksum. With `known`, it shares the bytes of its images with those that are read together with it.

        Raises `StorageError` when there is no such row, or its bytes changed."""
        if not 0 <= row < len(self._rows) - 1:
            raise StorageError(f"{self.path} has {len(self._rows) - 1} trajectories, none in row {row}")
        ends = _TWO_ROWS.unpack_from(self._row_bytes, row * _ROW_BYTES)
        begin, first, *_, end, last, _, _, _, checksum = ends
        if self.summary.compressed:
            with _naming(self.path):
                record = self._records[first:last].data
                arrays = [array[begin:end] for array in self._tokens]
        else:  # slices of mapped files, which cannot fail
            record = self._records[first:last].data
            arrays = [array[begin:end] for array in self._tokens]
            if copied:
                arrays = [array.copy() for array in arrays]
        if _checksum(arrays, record) != checksum & _UINT64:
            raise LostDataError(
                f"{self.path} is corrupt: trajectory {row} does not match its checksum; {_REMEDY}"
            )
        values = msgpack.unpackb(record)
        values[_TURNS] = tuple([Turn(*turn) for turn in values[_TURNS]])
        if values[_PARENT] is not None:
            values[_PARENT] = Parent(*values[_PARENT])
        if len(values) > _IMAGES:
            values[_IMAGES] = self.images.placed(values[_IMAGES], {} if known is None else known)
        if len(values) < len(RECORD_FIELDS):  # the younger fields have defaults
            tokens: dict[str, Any] = dict(zip(TOKEN_ARRAYS, arrays, strict=True))
            return Trajectory(**dict(zip(RECORD_FIELDS, values, strict=False)), **tokens)
        return _make(*values, *arrays)

    def close(self) -> None:
        """Unmap the file; a view of it that is still held keeps it mapped."""
        self._arrays.clear()
        self._tokens = ()
        self._records = _NO_RECORDS
        self.images = ImageBlobs(self.path)
