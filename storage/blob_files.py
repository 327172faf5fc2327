"""Blobs as files: in a directory that others mount, or that a server shows."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

import xxhash

from bus.blobs import checked
from bus.errors import BusError, ConfigError
from bus.messages import BlobRef
from storage.files import remove_leftovers, temporary_sibling

SUFFIX = ".blob"
SETTING = "learner.publication.transport."


class FileBlobs:
    """A directory of this run's own. Readers find it under `origin`, a URL."""

    def __init__(self, directory: Path, origin: str = "", *, setting: str = SETTING + "directory") -> None:
        self.directory = directory
        self._setting = setting
        self.origin = origin or directory.absolute().as_uri()

    async def start(self) -> None:
        """Make the directory, and remove what an earlier learner left in it.

        Raises `ConfigError` when it cannot be written."""
        await asyncio.to_thread(self._start)

    async def put(self, data: bytes, *tokens: object) -> BlobRef:
        """Write a file and give it its name when it is whole."""
        return await asyncio.to_thread(self._put, data, tokens)

    async def holds(self, refs: Iterable[BlobRef]) -> bool:
        """Whether all are there in their full size."""
        return await asyncio.to_thread(lambda: all(self._has(ref) for ref in refs))

    async def delete(self, ref: BlobRef) -> None:
        """Remove the file. Who reads it now can read to the end."""
        await asyncio.to_thread((self.directory / file_name(ref)).unlink, missing_ok=True)

    async def close(self) -> None:
        """Nothing is open; the files stay for those who still read."""

    def keep(self, ref: BlobRef, data: bytes | bytearray) -> None:
        """Write what was fetched from elsewhere under its own name."""
        self._write(file_name(ref), data)

    def _start(self) -> None:
        probe = self.directory / (SUFFIX + ".probe")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"")
            probe.unlink()
            remove_leftovers(self.directory)
            for old in self.directory.glob("*" + SUFFIX):
                old.unlink()
        except OSError as error:
            raise ConfigError(
                f"weights cannot lie in {self.directory} ({error.strerror}): make it writable, or set "
                f"{self._setting} to another"
            ) from error

    def _put(self, data: bytes, tokens: tuple[object, ...]) -> BlobRef:
        digest = xxhash.xxh3_128_hexdigest(data)
        subject = ".".join([*map(str, tokens), digest[:12]])
        ref = BlobRef(subject=subject, chunks=1, size_bytes=len(data), digest=digest, origin=self.origin)
        self._write(file_name(ref), data)
        return ref

    def _write(self, name: str, data: bytes | bytearray) -> None:
        """Not made durable: what a power cut takes is published again."""
        path = self.directory / name
        temporary = temporary_sibling(path)
        try:
            temporary.write_bytes(data)
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise BusError(f"cannot write {path}: {error.strerror}") from error

    def _has(self, ref: BlobRef) -> bool:
        path = self.directory / file_name(ref)
        return path.is_file() and path.stat().st_size == ref.size_bytes


def file_name(ref: BlobRef) -> str:
    """Name of the file that holds `ref`. Raises `BusError` for one that leads elsewhere."""
    if "/" in ref.subject or ref.subject.startswith("."):
        raise BusError(f"{ref.subject!r} is no name of a blob")
    return ref.subject + SUFFIX


def read_file(directory: Path, ref: BlobRef) -> bytes:
    """The bytes behind `ref`. Raises `BusError` when they are gone or are not what was stored."""
    path = directory / file_name(ref)
    try:
        if path.stat().st_size != ref.size_bytes:  # before all of it is read
            raise BusError(f"{path} has {path.stat().st_size} bytes, not {ref.size_bytes}")
        return checked(ref, path.read_bytes())
    except OSError as error:
        raise BusError(f"cannot read {path}: {error.strerror}") from error
