"""Writes the trajectories of a run as rows: JSONL, Parquet, or a directory that `datasets` reads."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import structlog

from bus.codec import Json
from bus.errors import ConfigError
from bus.trajectory import TASK_KEYS, Trajectory
from launch.trajectories.facts import RATIOS, facts_of
from launch.trajectories.search import Search, TrajectoryFilter, answer_text, opened, prompt_text
from launch.trajectories.sources import TrajectorySource
from launch.trajectories.token_texts import Decode
from launch.trajectories.training import GroupTraining
from storage.disk.atomic_files import temporary_sibling
from storage.disk.file_errors import naming

if TYPE_CHECKING:
    import pyarrow

log = structlog.get_logger()
AT_ONCE = 8
"""Groups that are read at a time."""
TRAINED_AT_ONCE = 4096
"""Groups of which is read at a time what the learner made of them."""
ROW_GROUP, ROW_GROUP_BYTES = 4096, 64 << 20
"""Rows of a group of Parquet's, and their bytes, from which it is written."""
ROWS_A_FILE = 50_000
"""Rows after which a directory gets its next file."""
Row = dict[str, Json]
_TEXT = (
    "trajectory_id", "agent", "policy", "actor", "source", "task", "label", "reward_source", "end",
    "training", "prompt", "answer", "data_set",
)  # fmt: skip
_WHOLE = (
    "lease_id", "rollout", "step", "tokens", "masked_tokens", "oldest_version", "newest_version",
    "evaluated_version",
)  # fmt: skip
_FLAGS = ("trained", "held_out", "greedy")
_NUMBERS = ("reward", "advantage", "weight", *RATIOS)
_OBJECTS = ("reward_components", "metadata")
"""Objects, which Parquet has as JSON: their keys differ from row to row."""
_ARRAYS = {"token_ids": "int32", "loss_mask": "bool", "behaviour_logprobs": "float32"}


class Writer(Protocol):
    """Takes rows in their order."""

    def write(self, rows: Sequence[Row]) -> None:
        """Add rows."""

    def close(self) -> None:
        """Write what is left."""


async def export_run(
    source: TrajectorySource,
    wanted: TrajectoryFilter,
    path: Path,
    stop: asyncio.Event,
    *,
    token_ids: bool = False,
) -> int:
    """Write what is wanted to `path`, in the order of the leases, and return the number of rows. The path's
    ending decides: `.jsonl`, `.parquet`, or none for a directory of Parquet. It appears when it is whole.
    Raises `ConfigError` for a path that exists or ends otherwise, and on `stop`."""
    count = 0
    with _whole(path) as temporary:
        async with opened(source, wanted) as search:
            leases = await search.leases()
            writer = _writer(path.suffix, temporary, token_ids=token_ids)
            try:
                async for rows in _each_rows(source, search, leases, token_ids=token_ids):
                    await asyncio.to_thread(writer.write, rows)
                    count += len(rows)
                    if stop.is_set():
                        raise ConfigError(f"stopped after {count} trajectories: {path} was not made")
            finally:
                writer.close()
            if search.left_out:
                log.warning("export_incomplete", reason=search.left_out)
    return count


async def _each_rows(
    source: TrajectorySource, search: Search, leases: Sequence[int], *, token_ids: bool
) -> AsyncIterator[list[Row]]:
    """Yield the rows of a few groups at a time. What was made of many is read at once: that reads the whole
    ledger."""
    for start in range(0, len(leases), TRAINED_AT_ONCE):
        many = leases[start : start + TRAINED_AT_ONCE]
        training = await source.training(many)
        for first in range(0, len(many), AT_ONCE):
            groups = await search.read(many[first : first + AT_ONCE])
            yield await asyncio.to_thread(_rows, groups, training, search.decode, token_ids=token_ids)


def _rows(
    groups: Sequence[Sequence[Trajectory]], training: Mapping[int, GroupTraining], decode: Decode, *,
    token_ids: bool,
) -> list[Row]:  # fmt: skip
    return [row_of(t, training[t.lease_id], decode, token_ids=token_ids) for group in groups for t in group]


def row_of(t: Trajectory, training: GroupTraining, decode: Decode, *, token_ids: bool) -> Row:
    """Return the row of a trajectory, whose columns docs/operations.md describes."""
    steps = training.weights if t.is_trained else {}
    task = next((str(t.metadata[key]) for key in TASK_KEYS if key in t.metadata), None)
    row: Row = {
        **facts_of(t, training),
        "task": task,
        "step": max(steps, default=None),
        "weight": steps[max(steps)] if steps else None,
        "prompt": prompt_text(t, decode),
        "answer": answer_text(t, decode),
    }
    if token_ids:
        row |= {name: getattr(t, name).tolist() for name in _ARRAYS}
    return row


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Yield where `path` is prepared, which becomes it at the end unless something is raised."""
    if path.suffix not in ("", ".jsonl", ".parquet"):
        raise ConfigError(f"--export {path}: it ends in .jsonl or .parquet, or in none for a directory")
    if path.exists():
        raise ConfigError(f"--export {path} exists already: give another path, or remove it")
    temporary = temporary_sibling(path)
    try:
        with naming(path):
            yield temporary
            temporary.rename(path)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)


def _writer(suffix: str, path: Path, *, token_ids: bool) -> Writer:
    if suffix == ".jsonl":
        return _JsonLines(path)
    if suffix == ".parquet":
        return _Parquet(path, token_ids=token_ids)
    return _Directory(path, lambda file: _Parquet(file, token_ids=token_ids))


class _JsonLines:
    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write(self, rows: Sequence[Row]) -> None:
        self._file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    def close(self) -> None:
        self._file.close()


class _Parquet:
    """Writes one Parquet file, in row groups of bounded size."""

    def __init__(self, path: Path, *, token_ids: bool) -> None:
        import pyarrow.parquet  # loads only for who exports

        self._schema = _schema(token_ids=token_ids)
        self._writer = pyarrow.parquet.ParquetWriter(path, self._schema, compression="zstd")
        self._waiting = self._schema.empty_table()

    def write(self, rows: Sequence[Row]) -> None:
        import pyarrow

        packed = [
            row | {name: json.dumps(row[name], ensure_ascii=False) for name in _OBJECTS} for row in rows
        ]
        new = pyarrow.Table.from_pylist(packed, self._schema)
        self._waiting = pyarrow.concat_tables([self._waiting, new])
        if len(self._waiting) >= ROW_GROUP or self._waiting.nbytes >= ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        self._writer.write_table(self._waiting)
        self._waiting = self._schema.empty_table()

    def close(self) -> None:
        if len(self._waiting):
            self._flush()
        self._writer.close()


class _Directory:
    """Writes Parquet files of bounded size, which `datasets` reads as one split."""

    def __init__(self, path: Path, begin: Callable[[Path], Writer]) -> None:
        self._path = path
        self._begin = begin
        path.mkdir()
        self._files = self._rows = 0
        self._file = self._next()

    def _next(self) -> Writer:
        self._files, self._rows = self._files + 1, 0
        return self._begin(self._path / f"train-{self._files - 1:05}.parquet")

    def write(self, rows: Sequence[Row]) -> None:
        if self._rows >= ROWS_A_FILE:
            self._file.close()
            self._file = self._next()
        self._file.write(rows)
        self._rows += len(rows)

    def close(self) -> None:
        self._file.close()


def _schema(*, token_ids: bool) -> "pyarrow.Schema":
    import pyarrow as pa

    columns = [
        *((name, pa.string()) for name in (*_TEXT, *_OBJECTS)),
        *((name, pa.int64()) for name in _WHOLE),
        *((name, pa.bool_()) for name in _FLAGS),
        *((name, pa.float64()) for name in _NUMBERS),
        *((name, pa.list_(pa.type_for_alias(kind))) for name, kind in _ARRAYS.items() if token_ids),
    ]
    return pa.schema(columns)
