"""Reads rows of a file or a dataset directory, with errors that say where and what to do."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from bus.codec import Json
from bus.errors import ConfigError, SluiceError, nearest, with_traceback
from bus.process.plugins import RAISED, load_function, names_function
from storage.prompt_files.hub_data import fetched_data, is_hub_data

if TYPE_CHECKING:
    from pyarrow import RecordBatch

MOST_ROWS = 1_000_000
"""Rows that are read of a source which has to end."""


class RowSource(Protocol):
    """Yields the rows of a source of prompts, without an end if it has none."""

    def __call__(self, position: int) -> Iterable[Mapping[str, Json]]:
        """Yield the rows from `position` on, counted from 0: the same row at the same position each time."""


def own_rows(source: Path, position: int = 0) -> Iterator[tuple[str, dict[str, Json]]]:
    """Yield the place and the values of each row from `position` on. Raises `ConfigError` for a function that
    cannot be loaded, raises or yields what is no row."""
    function: RowSource = load_function("source of prompts", str(source), {})
    what = f"data source {str(source)!r}"
    try:
        for number, values in enumerate(function(position), start=position + 1):
            yield f"{what}, row {number}", _checked(values, f"{what}, row {number}")
    except SluiceError:
        raise
    except RAISED as error:  # a user's function may raise anything
        raise ConfigError(
            with_traceback(f"{what} raised {error!r} for rows from {position} on", error)
        ) from error


def _checked(values: object, where: str) -> dict[str, Json]:
    if not isinstance(values, Mapping):
        raise ConfigError(
            f'{where}: a {type(values).__name__}, not an object: yield one like {{"prompt": ...}}'
        )
    return dict(values)


def ending_rows(source: Path) -> Iterator[tuple[str, dict[str, Json]]]:
    """Yield all rows. Raises `ConfigError` also for a source that does not end."""
    for number, row in enumerate(own_rows(source)):
        if number == MOST_ROWS:
            raise ConfigError(
                f"data source {str(source)!r} goes on after {MOST_ROWS} rows: name it in data.prompts, which "
                f"reads an endless source as rows are needed, or a slice of it, as {source}@[:1000]"
            )
        yield row


BATCH_ROWS = 1024
"""Rows of .parquet and .arrow that are in memory at a time."""
BUFFER_BYTES = 1 << 20
_SHARD = re.compile(r"(.+)-\d+-of-\d+")
"""Name of a file that is one of several of a split."""
_SLICE = re.compile(r"(.+)@\[(-?\d*):(-?\d*)\]")
Raw = tuple[str, bytes | dict[str, Json]]
"""Place of a row, and the row: a line of JSON, or its values."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row and its place in the file, for error messages."""

    where: str
    values: dict[str, Json]
    directory: Path = Path()
    """The directory of the file, to which paths in the row are relative."""
    has_all_fields: bool = False
    """Whether objects have the fields of all rows, null where a row had none, as in Parquet and Arrow."""

    def required(self, key: str) -> Json:
        """Return the value of `key`; raises `ConfigError` naming the keys there are."""
        if key not in self.values:
            raise ConfigError(f"{self.where}: {missing_key(key, self.values)}")
        return self.values[key]


def missing_key(key: str, present: Iterable[str]) -> str:
    """Return the error message for a `key` that is not among those `present`."""
    names = list(present)
    there = ", ".join(map(repr, names)) or "none"
    return f"no key {key!r}; {nearest(key, names)}the keys there are: {there}"


def kind_of(value: object) -> str:
    """Return what an error message calls `value`."""
    if value == "":
        return "an empty text"
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null"}
    return names.get(
        type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}"
    )


def read_rows(path: Path) -> Iterator[Row]:
    """Read all rows one by one, or those of a slice `file.jsonl@[a:b]`, which counts rows from 0.

    A function `my_pkg.my_module:function` stands for the rows that it yields.

    A directory, as Hugging Face's `datasets` saves or downloads it, is read as the files of its split, and
    `directory/split` as those of one of several. Raises `ConfigError` when it comes to what is wrong; lines
    of .jsonl count from 1 and blank ones are skipped, rows of .parquet and .arrow from 0."""
    file, wanted = _split(path)
    shards, empty = files_of(path), True
    directory = shards[0].parent if shards else Path()
    read: Callable[[], Iterator[Raw]] = partial(_raw, shards) if shards else partial(ending_rows, file)
    for where, content in _sliced(read, wanted):
        empty = False
        values = _json_values(where, content) if isinstance(content, bytes) else content
        yield Row(where, values, directory, has_all_fields=bool(shards) and isinstance(content, dict))
    if empty:
        what = "holds no rows" if wanted == slice(None) else f"has no rows in the slice of {path.name}"
        raise ConfigError(f"{file}: {what}: give a file or slice with at least one")


def files_of(path: Path) -> list[Path]:
    """Return the files that `read_rows` reads, in their order: none for a function. Raises `ConfigError`
    where there is none, and should be."""
    file, _ = _split(path)
    if names_function(file):
        return []
    if shards := _of_directory(file):
        return shards
    if is_hub_data(path):
        raise ConfigError(f"{path}: the data set has no such split or file: {_there(path, file)}")
    if file.suffix not in _READERS and not file.is_dir():
        raise ConfigError(
            f"{file}: cannot read {file.suffix or 'a file without extension'}: use .jsonl or .parquet"
        )
    if not file.is_file():
        raise ConfigError(f"{file}: {_absence(file)}")
    return [file]


def _sliced(read: Callable[[], Iterator[Raw]], wanted: slice) -> Iterator[Raw]:
    """Return the rows of a slice; one that counts from the end needs their number, by a pass of its own."""
    start, stop = wanted.start, wanted.stop
    if any(bound is not None and bound < 0 for bound in (start, stop)):
        start, stop, _ = wanted.indices(sum(1 for _ in read()))
        stop = max(start, stop)
    return islice(read(), start, stop)


def _raw(shards: Sequence[Path]) -> Iterator[Raw]:
    return (row for shard in shards for row in _READERS[shard.suffix](shard))


def _of_directory(path: Path) -> list[Path]:
    """Return the files of a dataset directory or of its split, in their order; none for anything else. Raises
    `ConfigError` where a split has to be named."""
    if path.is_dir():
        splits = _splits(path)
        if len(splits) > 1:
            example = path / next(iter(splits))
            raise ConfigError(f"{path} has the splits {', '.join(splits)}: name one, as {example}")
        return next(iter(splits.values()), [])
    return [] if path.exists() or not path.parent.is_dir() else _splits(path.parent).get(path.name, [])


def _splits(directory: Path) -> dict[str, list[Path]]:
    for place in (directory, directory / "data"):
        found: dict[str, list[Path]] = {}
        for file in sorted(place.iterdir()) if place.is_dir() else ():
            if file.suffix in _READERS and file.is_file():
                match = _SHARD.fullmatch(file.stem)
                found.setdefault(match[1] if match else file.stem, []).append(file)
        if found:
            return found
    return {}


def _split(path: Path) -> tuple[Path, slice]:
    if "@[" not in path.name:
        return _here(path), slice(None)
    match = _SLICE.fullmatch(str(path))
    if match is None:
        raise ConfigError(f"{path}: not a slice: write it as {path.name.partition('@[')[0]}@[100:200]")
    start, stop = (int(bound) if bound.strip("-") else None for bound in match.groups()[1:])
    return _here(Path(match[1])), slice(start, stop)


def _here(path: Path) -> Path:
    return fetched_data(path) if is_hub_data(path) else path


def _there(path: Path, file: Path) -> str:
    """Return what there is of a data set of the hub, for one who named something else."""
    found = next((place for place in file.parents if place.is_dir()), file.parent)
    splits = _splits(found) or {place.name: [] for place in sorted(found.iterdir()) if place.is_dir()}
    if not splits:
        return f"it has no .parquet, .jsonl or .arrow files under that name (looked for {path.name})"
    return f"there are {', '.join(splits)}"


def _absence(file: Path) -> str:
    if file.is_dir():
        return "is a directory without .jsonl, .parquet or .arrow files: name a file"
    if not file.parent.is_dir():
        return f"no such file, nor the directory {file.parent}: check the path"
    candidates = [path.name for path in file.parent.iterdir() if path.suffix in _READERS]
    return f"no such file: {nearest(file.name, candidates).strip() or 'check the path'}"


def _read_jsonl(file: Path) -> Iterator[Raw]:
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.isspace():
                    yield f"{file}, line {number}", line
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror}): check the file") from error


def _json_values(where: str, line: bytes) -> dict[str, Json]:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{where}: not JSON ({error.msg} at column {error.colno}): write one object a line"
        ) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{where}: not readable as UTF-8 JSON ({error}): write one object a line"
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(
            f'{where}: a {type(values).__name__}, not an object: write one like {{"prompt": ...}}'
        )
    return values


def _read_parquet(file: Path) -> Iterator[Raw]:
    import pyarrow
    import pyarrow.parquet

    try:
        # a column of a row group is read a buffer at a time: groups may have a million rows
        with pyarrow.parquet.ParquetFile(file, buffer_size=BUFFER_BYTES, pre_buffer=False) as opened:
            yield from _numbered(file, opened.iter_batches(BATCH_ROWS))
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{file}: not a readable Parquet file ({error}): write it again") from error


def _read_arrow(file: Path) -> Iterator[Raw]:
    import pyarrow

    try:
        with pyarrow.memory_map(str(file)) as source, pyarrow.ipc.open_stream(source) as stream:
            parts = (
                batch.slice(first, BATCH_ROWS)
                for batch in stream
                for first in range(0, batch.num_rows, BATCH_ROWS)
            )
            yield from _numbered(file, parts)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{file}: not a readable Arrow stream ({error}): save it again") from error


def _numbered(file: Path, batches: Iterable["RecordBatch"]) -> Iterator[Raw]:
    values = (row for batch in batches for row in batch.to_pylist())
    return ((f"{file}, row {number}", row) for number, row in enumerate(values, 1))


_READERS = {".jsonl": _read_jsonl, ".parquet": _read_parquet, ".arrow": _read_arrow}
