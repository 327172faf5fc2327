"""Which samples of which groups a shard holds, and in which row: 10^6 trajectories in 73 MB.

A trajectory's row counts from 0 over the whole shard, in the order of writing; merging segments and retiring
them changes no row. The index is arrays: five columns that are kept on disk, and two that follow from them.
Groups that are settled are forgotten (storage/store/settled.py)."""

import io
import zipfile
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from bus.errors import LostDataError, StorageError
from storage.disk.atomic_files import write_file
from storage.disk.file_errors import writing
from storage.store.settled import Settled

LARGEST_GROUP = int(np.iinfo(np.int32).max)
"""Samples that a group may have."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Lease, sample and length of each of N rows."""

    leases: NDArray[np.int64]
    samples: NDArray[np.int32]
    group_sizes: NDArray[np.int32]
    tokens: NDArray[np.int32]
    """0 in rows that were written before tokens were counted."""

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__))

    @classmethod
    def none(cls) -> Self:
        return cls(np.empty(0, np.int64), *(np.empty(0, np.int32) for _ in range(3)))

    def __len__(self) -> int:
        return len(self.leases)

    @property
    def lease_range(self) -> range:
        """Return the leases from the lowest to the highest."""
        return range(int(self.leases.min()), int(self.leases.max()) + 1) if len(self) else range(0)

    def __getitem__(self, rows: slice | NDArray[np.bool_]) -> "Columns":
        return Columns(self.leases[rows], self.samples[rows], self.group_sizes[rows], self.tokens[rows])


@dataclass(frozen=True)
class IndexFile:
    """What the index file of a store says: rows, and the entries that they lie in."""

    columns: Columns
    rows: NDArray[np.int64]
    """[N], the row of each in the store; those of settled groups are left out."""
    entries: NDArray[np.int64]
    """[E, 4]: last segment, row at which it ends, and the lowest and highest lease of each entry."""

    def lease_range(self, numbers: range) -> range:
        """Return the leases of the entries that end within these segment numbers, lowest to highest."""
        within = (self.entries[:, 0] >= numbers.start) & (self.entries[:, 0] < numbers.stop)
        found = self.entries[within & (self.entries[:, 3] >= 0)]
        return range(int(found[:, 2].min()), int(found[:, 3].max()) + 1) if len(found) else range(0)


def save_columns(path: Path, columns: Columns, **more: Any) -> None:
    """Replace `path` durably. Raises `StorageError` when the disk refuses."""
    buffer = io.BytesIO()
    np.savez(
        buffer,
        leases=columns.leases,
        samples=columns.samples,
        group_sizes=columns.group_sizes,
        tokens=columns.tokens,
        **more,
    )
    with writing(path):
        write_file(path, buffer.getvalue())


def load_columns(path: Path) -> tuple[Columns, dict[str, NDArray[np.int64]]]:
    """Return what `save_columns` wrote. Raises `StorageError` when it is missing or anything in it has
    changed."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as loaded:  # verifies checksums
            found = {name: loaded[name] for name in loaded.files}
            leases = found.pop("leases")
            tokens = found.pop("tokens", np.zeros(len(leases), np.int32))
            columns = Columns(leases, found.pop("samples"), found.pop("group_sizes"), tokens)
    except (FileNotFoundError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise LostDataError(f"{path} cannot be used ({error}): restore it") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be read ({error})") from error
    lengths = {len(columns.samples), len(columns.group_sizes), len(columns.tokens)}
    if lengths - {len(columns)}:
        raise LostDataError(f"{path} cannot be used (its columns differ in length): restore it")
    return columns, found


def load_index(path: Path) -> IndexFile:
    """Return what an index file says. Raises `StorageError` when it cannot be used."""
    columns, more = load_columns(path)
    rows, entries = more.get("rows"), more.get("entries")
    if rows is None or entries is None or len(rows) != len(columns) or entries.shape[1:] != (4,):
        raise LostDataError(f"{path} cannot be used (it is another build's): it is made anew")
    return IndexFile(columns, rows, entries)


class RowIndex:
    """Rows by group; each knows the one before it of the same group, and how many there are so far. The rows
    that are known have positions, in their order: the columns are by position."""

    def __init__(
        self, columns: Columns | None = None, rows: NDArray[np.int64] | None = None, total: int | None = None
    ) -> None:
        """Know these trajectories, which lie in these rows (None: the first ones) of `total`."""
        columns = columns or Columns.none()
        self._total = len(columns) if total is None else total
        self._learn(columns, np.arange(len(columns)) if rows is None else rows)

    def _learn(self, columns: Columns, rows: NDArray[np.int64]) -> None:
        self._leases = _as_array("q", columns.leases)
        self._samples = _as_array("i", columns.samples)
        self._sizes = _as_array("i", columns.group_sizes)
        self._tokens = _as_array("i", columns.tokens)
        self._rows = _as_array("q", rows)
        previous, ordinal, last = _chains(columns.leases)
        self._previous = _as_array("q", previous)
        """Position of the group's sample stored before this one, or -1."""
        self._ordinal = _as_array("i", ordinal)
        """How many samples of the group were stored with this one."""
        self._last: dict[int, int] = dict(zip(columns.leases[last].tolist(), last.tolist(), strict=True))

    @property
    def total(self) -> int:
        """Rows ever, known or forgotten."""
        return self._total

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, lease_id: int) -> bool:
        return lease_id in self._last

    def columns(self) -> Columns:
        return Columns(
            np.array(self._leases, np.int64),
            np.array(self._samples, np.int32),
            np.array(self._sizes, np.int32),
            np.array(self._tokens, np.int32),
        )

    def rows(self) -> NDArray[np.int64]:
        return np.array(self._rows, np.int64)

    def settled(self, settled: Settled) -> int:
        """Count the rows that `forget` would forget."""
        return int(np.count_nonzero(settled.which(np.array(self._leases, np.int64))))

    def forget(self, settled: Settled) -> None:
        """Know no more of groups that are settled."""
        columns, rows = self.columns(), self.rows()
        keep = ~settled.which(columns.leases)
        self._learn(columns[keep], rows[keep])

    def add(self, lease_id: int, sample: int, group_size: int, tokens: int) -> bool:
        """Index the next row; return whether the group has all its samples now."""
        last = self._last.get(lease_id, -1)
        ordinal = 1 + (self._ordinal[last] if last >= 0 else 0)
        self._last[lease_id] = len(self._leases)
        self._leases.append(lease_id)
        self._samples.append(sample)
        self._sizes.append(group_size)
        self._tokens.append(tokens)
        self._rows.append(self._total)
        self._previous.append(last)
        self._ordinal.append(ordinal)
        self._total += 1
        return ordinal >= group_size

    def full_groups(self, *, from_row: int = 0) -> list[int]:
        """Return the groups whose last sample of all was stored in `from_row` or later, in that order."""
        ordinal, sizes = np.array(self._ordinal, np.int32), np.array(self._sizes, np.int32)
        whole = (ordinal == sizes) & (self.rows() >= from_row)
        leases: list[int] = np.array(self._leases, np.int64)[whole].tolist()
        return leases

    def holds_all(self, lease_id: int) -> bool:
        return 0 < self.samples_stored(lease_id) == self.group_size(lease_id)

    def samples_stored(self, lease_id: int) -> int:
        last = self._last.get(lease_id, -1)
        return self._ordinal[last] if last >= 0 else 0

    def group_size(self, lease_id: int) -> int | None:
        """Return the size of a group of which something is stored, else None."""
        last = self._last.get(lease_id, -1)
        return self._sizes[last] if last >= 0 else None

    def stored(self, lease_id: int) -> list[int]:
        """Return the rows of the samples that are stored, by sample."""
        found = list(self._chain(self._last.get(lease_id, -1)))
        found.sort(key=self._samples.__getitem__)
        return [self._rows[at] for at in found]

    def key_of(self, row: int) -> tuple[int, int] | None:
        """Return lease and sample of the trajectory in a row; None where its group is forgotten."""
        at = bisect_left(self._rows, row)
        if at == len(self._rows) or self._rows[at] != row:
            return None
        return self._leases[at], self._samples[at]

    def tokens(self, lease_id: int) -> int:
        return sum(self._tokens[at] for at in self._chain(self._last.get(lease_id, -1)))

    def holds(self, lease_id: int, sample: int) -> bool:
        last = self._last.get(lease_id, -1)
        return last >= 0 and self._holds(last, sample)

    def _holds(self, last: int, sample: int) -> bool:
        if self._ordinal[last] == self._sizes[last]:
            return True
        return any(self._samples[at] == sample for at in self._chain(last))

    def _chain(self, last: int) -> Iterable[int]:
        while last >= 0:
            yield last
            last = self._previous[last]


def _as_array(typecode: str, values: NDArray[Any]) -> "array[int]":
    """Grows in place, and gives a single value faster than numpy does."""
    made: array[int] = array(typecode)
    made.frombytes(np.ascontiguousarray(values, dtype=typecode).view(np.uint8).data)
    return made


def _chains(leases: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return for each row the one before it of its lease and its ordinal, and for each lease its last row."""
    count = len(leases)
    order = np.argsort(leases, kind="stable")
    first = np.ones(count, np.bool_)  # whether a row is the first of its lease, in `order`
    first[1:] = leases[order[1:]] != leases[order[:-1]]
    begins = np.flatnonzero(first)
    previous, ordinal = np.empty(count, np.int64), np.empty(count, np.int64)
    previous[order] = np.where(first, -1, np.roll(order, 1))
    lengths = np.diff(begins, append=count)
    ordinal[order] = np.arange(count) - np.repeat(begins, lengths) + 1
    return previous, ordinal, order[begins + lengths - 1]
