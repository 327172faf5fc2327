"""Stores blobs as files, in a directory that others mount or that a server serves."""

import asyncio
import errno
import os
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote, urlsplit

from bus.errors import BusError, ConfigError, DamagedError
from bus.messages import BlobRef
from storage.disk.atomic_files import TEMPORARY_PREFIX, Content, Data, remove_leftovers, write_parts
from storage.weights.blob_parts import BlockDigests, is_part, part_range, parts_of
from storage.weights.new_memory import new_memory
from storage.weights.tensors import spare_threads

SUFFIX = ".blob"
SETTING = "learner.publication.transport."


def of_rank(directory: Path, rank: int) -> Path:
    """Return the directory of a rank's blobs: below that of rank 0, which removes what ranks of an earlier
    learner left."""
    return directory / f"rank-{rank}" if rank else directory


class FileBlobs:
    """A directory for blobs of this run. Readers find it under `origin`, a URL."""

    def __init__(self, directory: Path, origin: str = "", *, setting: str = SETTING + "directory") -> None:
        self.directory = directory
        self._setting = setting
        self.origin = origin or directory.absolute().as_uri()

    async def start(self) -> None:
        """Create the directory, and remove blobs of an earlier learner. Raises `ConfigError` when it cannot
        be written."""
        await asyncio.to_thread(self._start)

    async def put(self, content: Content, *tokens: object) -> BlobRef:
        """Write a file, which gets its name when it is complete."""
        return await asyncio.to_thread(self._put, content, tokens)

    async def holds(self, refs: Iterable[BlobRef]) -> bool:
        return await asyncio.to_thread(lambda: all(self._has(ref) for ref in refs))

    async def delete(self, ref: BlobRef) -> None:
        await asyncio.to_thread((self.directory / file_name(ref)).unlink, missing_ok=True)

    async def close(self) -> None:
        """Do nothing: no file is open, and files stay for readers."""

    def _start(self) -> None:
        probe = self.directory / (SUFFIX + ".probe")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"")
            probe.unlink()
            remove_leftovers(self.directory)
            for old in self.directory.rglob("*" + SUFFIX):
                old.unlink(missing_ok=True)  # a rank removes its own at the same time
        except OSError as error:
            raise ConfigError(
                f"weights cannot lie in {self.directory} ({error.strerror}): make it writable, or set "
                f"{self._setting} to another"
            ) from error

    def _put(self, content: Content, tokens: tuple[object, ...]) -> BlobRef:
        with ThreadPoolExecutor(spare_threads(), "digest") as threads:
            digests = BlockDigests(threads)
            written = self._write(digests.passing(content))
            ref = digests.ref(".".join(map(str, tokens)), self.origin)
        written.replace(self.directory / file_name(ref))
        return ref

    def _write(self, content: Content) -> Path:
        """Return a file with the content that has no name of a blob yet. It is written without fsync: what a
        power cut takes is published again."""
        temporary = self.directory / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        try:
            with temporary.open("wb", buffering=0) as file:
                write_parts(file.fileno(), content)
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise BusError(f"cannot write in {self.directory}: {error.strerror}") from error
            raise
        return temporary

    def _has(self, ref: BlobRef) -> bool:
        path = self.directory / file_name(ref)
        return path.is_file() and path.stat().st_size == ref.size_bytes


def file_name(ref: BlobRef) -> str:
    """Return the name of the file that holds `ref`. Raises `BusError` for a name that leads elsewhere."""
    if "/" in ref.subject or "\0" in ref.subject or ref.subject.startswith("."):
        raise BusError(f"{ref.subject!r} is no name of a blob")
    return ref.subject + SUFFIX


async def fetch_file(_bus: object, ref: BlobRef) -> Data:
    """Read the bytes behind `ref` from the directory that it names. Raises `BusError` as `read_file` does."""
    return await asyncio.to_thread(read_file, Path(unquote(urlsplit(ref.origin).path)), ref)


def read_file(directory: Path, ref: BlobRef) -> memoryview:
    """Read the bytes behind `ref`, on as many threads as this process can spare. Raises `BusError` when they
    are gone or differ from what was stored."""
    path = directory / file_name(ref)
    parts, data = parts_of(ref), new_memory(ref.size_bytes)
    try:
        with (
            open(path, "rb", buffering=0, opener=_without_wait) as file,
            ThreadPoolExecutor(spare_threads(), "read") as threads,
        ):
            if (size := os.fstat(file.fileno()).st_size) != ref.size_bytes:  # before the file is read
                raise BusError(f"{path} has {size} bytes, not {ref.size_bytes}")
            same = list(threads.map(lambda part: _read_part(file.fileno(), ref, part, data), parts))
    except OSError as error:
        raise BusError(f"cannot read {path}: {error.strerror}") from error
    if not all(same):
        raise DamagedError(f"{path}: part {same.index(False)} does not have its digest")
    return data


def _without_wait(path: str, flags: int) -> int:
    """Open a file, also a pipe that nobody writes to, without waiting."""
    return os.open(path, flags | os.O_NONBLOCK)


def _read_part(descriptor: int, ref: BlobRef, part: int, data: memoryview) -> bool:
    """Read a part into its place, and tell whether it has its digest. Raises `OSError`."""
    start, end = part_range(ref, part)
    place = left = data[start:end]
    while left:
        count = os.preadv(descriptor, [left], start)
        if not count:
            size = os.fstat(descriptor).st_size
            raise OSError(errno.ENODATA, f"it has {size} bytes, not {ref.size_bytes}")
        left, start = left[count:], start + count
    return is_part(ref, part, place)
