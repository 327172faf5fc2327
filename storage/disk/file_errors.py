"""What is wrong with a file or a disk, in words, with its remedy."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bus.errors import ConfigError, DiskFullError, SluiceError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REMEDIES = {
    errno.EISDIR: "is a directory, and a file belongs there: move it away",
    errno.ENOTDIR: "lies below a file, where a directory belongs: move that file away",
    errno.EACCES: "may not be used by this user: change its owner or its rights",
    errno.EPERM: "may not be used by this user: change its owner or its rights",
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


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have an error of the operating system name this file: what a write raises names none."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


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
