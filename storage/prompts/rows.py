"""Reads rows of a .jsonl or .parquet file, with errors that say where and what to do."""

import difflib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bus.codec import Json
from bus.errors import ConfigError

_SLICE = re.compile(r"(.+)@\[(-?\d*):(-?\d*)\]")


@dataclass(frozen=True, slots=True)
class Row:
    """One row and its place in the file, for error messages."""

    where: str
    values: dict[str, Json]

    def required(self, key: str) -> Json:
        """Return the value of `key`; raises `ConfigError` naming the keys there are."""
        if key not in self.values:
            raise ConfigError(f"{self.where}: {missing_key(key, self.values)}")
        return self.values[key]


def missing_key(key: str, present: Iterable[str]) -> str:
    """Return the error message for a `key` that is not among those `present`."""
    names = list(present)
    close = difflib.get_close_matches(key, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    there = ", ".join(map(repr, names)) or "none"
    return f"no key {key!r}; {hint}the keys there are: {there}"


def read_rows(path: Path) -> list[Row]:
    """Read all rows, or those of a slice `file.jsonl@[a:b]`, which counts rows from 0.

    Raises `ConfigError`; lines of .jsonl count from 1 and blank ones are skipped, rows of .parquet from 0."""
    file, wanted = _split(path)
    if file.suffix not in _READERS:
        raise ConfigError(
            f"{file}: cannot read {file.suffix or 'a file without extension'}: use .jsonl or .parquet"
        )
    if not file.is_file():
        raise ConfigError(f"{file}: {_absence(file)}")
    rows = _READERS[file.suffix](file, wanted)
    if not rows:
        what = "holds no rows" if wanted == slice(None) else f"has no rows in the slice of {path.name}"
        raise ConfigError(f"{file}: {what}: give a file or slice with at least one")
    return rows


def _split(path: Path) -> tuple[Path, slice]:
    """Return the file and the slice of its rows."""
    if "@[" not in path.name:
        return path, slice(None)
    match = _SLICE.fullmatch(str(path))
    if match is None:
        raise ConfigError(f"{path}: not a slice: write it as {path.name.partition('@[')[0]}@[100:200]")
    start, stop = (int(bound) if bound.strip("-") else None for bound in match.groups()[1:])
    return Path(match[1]), slice(start, stop)


def _absence(file: Path) -> str:
    if file.is_dir():
        return "is a directory: name a file in it"
    if not file.parent.is_dir():
        return f"no such file, nor the directory {file.parent}: check the path"
    candidates = [path.name for path in file.parent.iterdir() if path.suffix in _READERS]
    close = difflib.get_close_matches(file.name, candidates, n=1)
    return f"no such file: {f'did you mean {close[0]!r}?' if close else 'check the path'}"


def _read_jsonl(file: Path, wanted: slice) -> list[Row]:
    with file.open("rb") as lines:
        numbered = [(number, line) for number, line in enumerate(lines, 1) if not line.isspace()]
    return [_json_row(f"{file}, line {number}", line) for number, line in numbered[wanted]]


def _json_row(where: str, line: bytes) -> Row:
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
    return Row(where, values)


def _read_parquet(file: Path, wanted: slice) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{file}: not a readable Parquet file ({error}): write it again") from error
    start, stop, _ = wanted.indices(table.num_rows)
    chosen = table.slice(start, max(0, stop - start)).to_pylist()
    return [Row(f"{file}, row {number}", values) for number, values in enumerate(chosen, start)]


_READERS = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
