"""What is wrong with a file or a disk, in words, with its remedy."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bus.errors import (
    FILE_NOT_WRITTEN,
    ConfigError,
    DiskFullError,
    SluiceError,
    StorageError,
    system_errors,
    tells,
)

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REMEDIES = {
    errno.EISDIR: "is a directory, and a file belongs there: move it away",
    errno.ENOTDIR: "lies below a file, where a directory belongs: move that file away",
    errno.EACCES: "may not be used by this user: change its owner or its rights",
    errno.EPERM: "may not be used by this user: change its owner or its rights",
    errno.EFBIG: "may not grow further: raise the limit of files' sizes (ulimit -f)",
    errno.EROFS: "lies on a disk that is read-only: mount it for writing, or name another directory",
}
LEAST_FREE_BYTES = 32 << 20
"""Free bytes below which a disk counts as full: ledger, segments and logs may need as many at any moment."""


def file_error(error: OSError) -> SluiceError | None:
    """Return an error for the user if a file or a disk is what went wrong; None for any other error."""
    where = error.filename
    if error.errno in _FULL:
        what = "a file" if where is None else str(where)
        return DiskFullError(f"the disk is full, and {what} could not be written: free some, and start again")
    if where is None or error.errno not in _REMEDIES:
        return None
    return ConfigError(f"{where} {_REMEDIES[error.errno]}")


def unwritable(target: Path, error: OSError) -> StorageError:
    """Return the error of a file or directory that could not be written; `DiskFullError` for a full disk."""
    told = file_error(error)
    kind = DiskFullError if isinstance(told, DiskFullError) else StorageError
    return kind(f"cannot write {target}: {told or error}")


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Have an error of the operating system become that of a target which could not be written."""
    try:
        yield
    except OSError as error:
        raise unwritable(target, error) from error


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have an error of the operating system name this file or directory: what a write raises names none.

    A full disk, a quota or a limit of files' sizes that a library tells in another error, as safetensors and
    torch do, becomes such an `OSError`."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise
    except Exception as error:
        if (number := _told_otherwise(error, path)) is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def _told_otherwise(error: BaseException, path: Path) -> int | None:
    """Return the number of the system's error by which no more could be written; None for other errors."""
    found: BaseException | None = error
    while found is not None:
        numbers = [found.errno] if isinstance(found, OSError) else []
        for number in (*numbers, *system_errors(found)):
            if number in (*_FULL, errno.EFBIG):
                return number
        found = found.__cause__ or found.__context__
    is_unwritten = any(tells(error, part) for part in FILE_NOT_WRITTEN)
    return errno.ENOSPC if is_unwritten and lack_of_room(_existing(path)) else None


def _existing(path: Path) -> Path:
    return next((one for one in (path, *path.parents) if one.is_dir()), path)


def lack_of_room(directory: Path) -> str:
    """Return what is wrong when the disk of a directory is full; empty for one with room, or away."""
    try:
        disk = shutil.disk_usage(directory)
    except FileNotFoundError:
        return ""
    if disk.free >= LEAST_FREE_BYTES:
        return ""
    return (
        f"the disk of {directory} is full: {disk.free >> 20} of {disk.total >> 20} MiB are free, and nothing "
        "more is stored: free some"
    )
