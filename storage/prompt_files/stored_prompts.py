"""Prompts on disk, of which memory holds only where each begins, and the digests that name them."""

import json
import os
import weakref
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import numpy as np
import xxhash
from numpy.typing import NDArray

from bus.codec import Json, Message, encode
from bus.errors import LostDataError, StorageError
from bus.messages import Prompt
from storage.disk.atomic_files import fsync_path, one_at_a_time, temporary_sibling

_MORE_BYTES = 16
"""More than a prompt on the bus has beyond its identity, which leaves out that it has no tools."""
_HEADER = 5
"""Numbers of an index before the offsets: the file's stamp, and the size of the largest prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _WithoutTools(Message, tag="prompt"):
    """A prompt as every build had it: prompts without tools keep the digests that ledgers have noted."""

    content: str | list[Json]
    label: str | None
    metadata: dict[str, Json]


def digest_of(prompts: Iterable[Prompt]) -> str:
    """Return a digest of these prompts in this order."""
    digest = xxhash.xxh3_128()
    for prompt in prompts:
        digest.update(identity_of(prompt))
    return digest.hexdigest()


def identity_of(prompt: Prompt) -> bytes:
    """Return the bytes that say which prompt it is, the same in every build."""
    if prompt.tools:
        return encode(prompt)
    return encode(_WithoutTools(content=prompt.content, label=prompt.label, metadata=prompt.metadata))


class StoredPrompts(Sequence[Prompt]):
    """Prompts of a file that nobody changes. Each is read when it is asked for. Memory holds 8 bytes a
    prompt. Reading one raises `LostDataError` where the file is no longer whole."""

    def __init__(self, path: Path, digest: str, offsets: NDArray[np.int64], largest_bytes: int) -> None:
        self.path = path
        self.digest = digest
        """Digest of the prompts in their order, as `digest_of` has it."""
        self.largest_bytes = largest_bytes
        """Size of the largest prompt on the bus, with its label, metadata and tools."""
        self._offsets = offsets
        self._file = os.open(path, os.O_RDONLY)  # prompts stay there though the name should go
        weakref.finalize(self, os.close, self._file)

    def __reduce__(self) -> tuple[object, ...]:
        """Have another process of this host open the file."""
        return StoredPrompts, (self.path, self.digest, self._offsets, self.largest_bytes)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[n] for n in range(len(self))[index]]
        n = range(len(self))[index]
        first, after = int(self._offsets[n]), int(self._offsets[n + 1])
        return _prompt(os.pread(self._file, after - first, first), self.path)

    def __iter__(self) -> Iterator[Prompt]:
        """Read all prompts in order, a block of the file at a time."""
        with self.path.open("rb") as lines:
            for line in lines:
                yield _prompt(line, self.path)


def store_prompts(prompts: Iterable[Prompt], directory: Path) -> StoredPrompts:
    """Write prompts as they come to the file of `directory` that their digest names, durably. Raises
    `StorageError` when the disk refuses, and whatever `prompts` raises; then no file is left."""
    temporary = temporary_sibling(directory / "prompts.jsonl")
    with one_at_a_time(directory / "prompts"):
        try:
            with temporary.open("wb") as file:
                tally = _Tally()
                for prompt in prompts:
                    file.write(tally.add(prompt))
                file.flush()
                os.fsync(file.fileno())
            path = copy_path(directory, tally.digest)
            temporary.replace(path)
            fsync_path(directory)
            tally.save_index(path)
        except OSError as error:
            raise StorageError(f"cannot write {temporary}: {error}") from error
        finally:
            temporary.unlink(missing_ok=True)
        return tally.stored(path)


def open_stored(directory: Path, digest: str, *, source: str, save_index: bool = True) -> StoredPrompts:
    """Open the prompts of this digest, which `store_prompts` wrote.

    A file that is as it was when its index was made is taken as it is; another one is read once.

    Args:
        directory: the one they were stored in.
        digest: of the prompts.
        source: where they came from, for the error.
        save_index: whether an index that had to be made is kept beside the file.

    Raises `StorageError` when the file is gone, and `LostDataError` when it holds other prompts."""
    path = copy_path(directory, digest)
    try:
        if (known := _saved_index(path)) is not None:
            return StoredPrompts(path, digest, known[_HEADER:], int(known[_HEADER - 1]))
        tally = _tally_of(path)
        if tally is None or tally.digest != digest:
            raise LostDataError(f"{path} is not the copy of {source} that it was: restore it")
        if save_index:
            tally.save_index(path)
        return tally.stored(path)
    except FileNotFoundError as error:
        raise StorageError(
            f"the copy of {source} cannot be read ({path}: no such file): restore it"
        ) from error
    except OSError as error:
        raise StorageError(f"the copy of {source} cannot be read ({path}: {error}): restore it") from error


def copy_path(directory: Path, digest: str) -> Path:
    """Return where the prompts of a digest are stored."""
    return directory / f"prompts-{digest}.jsonl"


def stamp_of(path: Path) -> tuple[int, int, int, int]:
    """Return numbers that differ once a file was written, replaced or restored. Raises `OSError`."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


class _Tally:
    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()
        self._offsets = array("q", [0])
        self._largest = 0

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def add(self, prompt: Prompt) -> bytes:
        line = _line(prompt)
        self.count(prompt, len(line))
        return line

    def count(self, prompt: Prompt, line_bytes: int) -> None:
        identity = identity_of(prompt)
        self._digest.update(identity)
        self._offsets.append(self._offsets[-1] + line_bytes)
        if len(identity) + _MORE_BYTES > self._largest:  # few are: most need not be encoded once more
            self._largest = max(self._largest, len(encode(prompt)))

    def stored(self, path: Path) -> StoredPrompts:
        return StoredPrompts(path, self.digest, np.frombuffer(self._offsets, np.int64), self._largest)

    def save_index(self, path: Path) -> None:
        """Write the index beside the file; after a crash the file is read again, which needs no fsync."""
        temporary = temporary_sibling(_index_path(path))
        header = np.array([*stamp_of(path), self._largest], np.int64)
        with temporary.open("wb") as file:
            np.save(file, np.concatenate([header, np.frombuffer(self._offsets, np.int64)]))
        temporary.replace(_index_path(path))


def _tally_of(path: Path) -> _Tally | None:
    tally = _Tally()
    try:
        with path.open("rb") as lines:
            for line in lines:
                tally.count(_prompt(line, path), len(line))
    except LostDataError:
        return None
    return tally


def _saved_index(path: Path) -> NDArray[np.int64] | None:
    """Return the index of a file; None where there is none, or the file has changed. Raises `OSError`."""
    stamp = stamp_of(path)
    try:
        found: NDArray[np.int64] = np.load(_index_path(path))
    except (FileNotFoundError, ValueError, EOFError):
        return None
    whole = found.dtype == np.int64 and len(found) > _HEADER and found[-1] == stamp[0]
    return found if whole and tuple(found[: len(stamp)].tolist()) == stamp else None


def _index_path(path: Path) -> Path:
    return path.with_suffix(".index.npy")


def _line(prompt: Prompt) -> bytes:
    row = {"prompt": prompt.content, "label": prompt.label, "metadata": prompt.metadata}
    return (json.dumps({**row, "tools": prompt.tools} if prompt.tools else row) + "\n").encode()


def _prompt(line: bytes, path: Path) -> Prompt:
    try:
        row = json.loads(line)
        return Prompt(
            content=row["prompt"], label=row["label"], metadata=row["metadata"], tools=row.get("tools", [])
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LostDataError(f"{path} is no longer whole ({error!r}): restore it") from error
