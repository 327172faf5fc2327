"""Which samples of which groups a shard holds, and in which row: what is known of 10^6 trajectories in 65 MB.

A trajectory's row counts from 0 over the whole shard, in the order of writing; merging segments and retiring
them changes no row. The index is arrays: four columns that are kept on disk, and two that follow from them.
"""

import io
import zipfile
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from bus.errors import LostDataError, StorageError
from storage.disk.atomic_files import write_file

LARGEST_GROUP = int(np.iinfo(np.int32).max)
"""Samples that a group may have."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Lease, sample and length of each of N rows."""

    leases: NDArray[np.int64]
    samples: NDArray[np.int32]
    group_sizes: NDArray[np.int32]
    tokens: NDArray[np.int32]
    """0 in what was written before they were counted."""

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Return the rows of `parts`, one after the other."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__))

    @classmethod
    def none(cls) -> Self:
        """Return no rows."""
        return cls(np.empty(0, np.int64), *(np.empty(0, np.int32) for _ in range(3)))

    def __len__(self) -> int:
        return len(self.leases)

    def __getitem__(self, rows: slice) -> "Columns":
        return Columns(self.leases[rows], self.samples[rows], self.group_sizes[rows], self.tokens[rows])


def save_columns(path: Path, columns: Columns, ends: Sequence[int]) -> None:
    """Replace `path` durably. `ends` says where each segment's rows end, by the segment's number."""
    buffer = io.BytesIO()
    np.savez(
        buffer,
        leases=columns.leases,
        samples=columns.samples,
        group_sizes=columns.group_sizes,
        tokens=columns.tokens,
        ends=np.asarray(ends, np.int64),
    )
    try:
        write_file(path, buffer.getvalue())
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error}") from error


def load_columns(path: Path) -> tuple[Columns, NDArray[np.int64]]:
    """Return what `save_columns` wrote. Raises `StorageError` when it is missing or anything in it has
    changed."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as found:  # checks their checksums
            leases = found["leases"]
            tokens = found["tokens"] if "tokens" in found else np.zeros(len(leases), np.int32)
            columns = Columns(leases, found["samples"], found["group_sizes"], tokens)
            ends = found["ends"]
    except (FileNotFoundError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise LostDataError(f"{path} cannot be used ({error}): restore it") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be read ({error})") from error
    lengths = {len(columns.samples), len(columns.group_sizes), len(columns.tokens), *ends[-1:].tolist()}
    if lengths - {len(columns)}:
        raise LostDataError(f"{path} cannot be used (its columns differ in length): restore it")
    return columns, ends


class RowIndex:
    """Rows by group; each row knows the one before it of the same group, and how many there are so far."""

    def __init__(self, columns: Columns | None = None) -> None:
        columns = columns or Columns.none()
        self._leases = _as_array("q", columns.leases)
        self._samples = _as_array("i", columns.samples)
        self._sizes = _as_array("i", columns.group_sizes)
        self._tokens = _as_array("i", columns.tokens)
        previous, ordinal, last = _chains(columns.leases)
        self._previous = _as_array("q", previous)
        """Row of the group's sample stored before this one, or -1."""
        self._ordinal = _as_array("i", ordinal)
        """How many samples of the group were stored with this one."""
        self._last: dict[int, int] = dict(zip(columns.leases[last].tolist(), last.tolist(), strict=True))

    def __len__(self) -> int:
        return len(self._leases)

    def columns(self, rows: slice = slice(None)) -> Columns:
        """Return a copy."""
        return Columns(
            np.array(self._leases[rows], np.int64),
            np.array(self._samples[rows], np.int32),
            np.array(self._sizes[rows], np.int32),
            np.array(self._tokens[rows], np.int32),
        )

    def add(self, lease_id: int, sample: int, group_size: int, tokens: int) -> bool:
        """Index the next row; return whether the group has all its samples now."""
        last = self._last.get(lease_id, -1)
        ordinal = 1 + (self._ordinal[last] if last >= 0 else 0)
        self._last[lease_id] = len(self._leases)
        self._leases.append(lease_id)
        self._samples.append(sample)
        self._sizes.append(group_size)
        self._tokens.append(tokens)
        self._previous.append(last)
        self._ordinal.append(ordinal)
        return ordinal >= group_size

    def full_groups(self) -> list[int]:
        """Return the groups that have all their samples, in the order in which the last ones were stored."""
        ordinal, sizes = np.array(self._ordinal, np.int32), np.array(self._sizes, np.int32)
        leases: list[int] = np.array(self._leases, np.int64)[ordinal == sizes].tolist()
        return leases

    def holds_all(self, lease_id: int) -> bool:
        """Tell whether all samples of the group are stored."""
        return 0 < self.samples_stored(lease_id) == self.group_size(lease_id)

    def samples_stored(self, lease_id: int) -> int:
        """Return how many samples of the group are stored."""
        last = self._last.get(lease_id, -1)
        return self._ordinal[last] if last >= 0 else 0

    def group_size(self, lease_id: int) -> int | None:
        """Return the size of a group of which something is stored, else None."""
        last = self._last.get(lease_id, -1)
        return self._sizes[last] if last >= 0 else None

    def stored(self, lease_id: int) -> list[int]:
        """Return the rows of the samples that are stored, by sample."""
        rows = list(self._chain(self._last.get(lease_id, -1)))
        rows.sort(key=self._samples.__getitem__)
        return rows

    def tokens(self, lease_id: int) -> int:
        """Return the number of tokens of all stored samples of a group."""
        return sum(self._tokens[row] for row in self._chain(self._last.get(lease_id, -1)))

    def holds(self, lease_id: int, sample: int) -> bool:
        """Return whether this sample of the group is stored."""
        last = self._last.get(lease_id, -1)
        return last >= 0 and self._holds(last, sample)

    def _holds(self, last: int, sample: int) -> bool:
        if self._ordinal[last] == self._sizes[last]:
            return True
        return any(self._samples[row] == sample for row in self._chain(last))

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
    first = np.ones(count, np.bool_)  # of its lease, in `order`
    first[1:] = leases[order[1:]] != leases[order[:-1]]
    begins = np.flatnonzero(first)
    previous, ordinal = np.empty(count, np.int64), np.empty(count, np.int64)
    previous[order] = np.where(first, -1, np.roll(order, 1))
    lengths = np.diff(begins, append=count)
    ordinal[order] = np.arange(count) - np.repeat(begins, lengths) + 1
    return previous, ordinal, order[begins + lengths - 1]
