"""Whether a disk has room left, in words: what cannot be written is said with its remedy."""

import shutil
from pathlib import Path

LEAST_FREE_BYTES = 32 << 20
"""Free bytes below which a disk counts as full: ledger, segments and logs may need as many at any moment."""


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
