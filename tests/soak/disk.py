"""A disk of its own for a soaked run, which can be filled."""

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DISK_BYTES = 6 << 30


@contextmanager
def small_disk(directory: Path) -> Iterator[bool]:
    """Mount a file system at `directory`; yield whether that was allowed. Leaving unmounts it."""
    directory.mkdir(parents=True)
    image = directory.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)  # takes space only as it is used
    try:
        mounted = _runs("mkfs.ext4", "-q", "-m", "0", str(image)) and _runs(
            "mount", "-o", "loop", str(image), str(directory)
        )
        try:
            yield mounted
        finally:
            if mounted:
                _runs("umount", "--lazy", str(directory))
    finally:
        image.unlink()


def fill(directory: Path, ballast: str = "ballast") -> Path:
    """Take all free space of the disk of `directory`; return the file that has it."""
    path = directory / ballast
    free = os.statvfs(directory)
    with path.open("wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, max(1, free.f_bavail * free.f_frsize * 99 // 100))
        file.seek(0, os.SEEK_END)
        try:
            while file.write(bytes(1 << 20)):
                continue
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    return path


def _runs(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
