"""Bounds the log files that our child processes write to: the size of each, and how many there are."""

import os
import shutil
from pathlib import Path

LOG_BYTES = 64 << 20
"""Size from which a log file is continued in an empty one; the part before it is kept once."""


def rotated(file: Path, limit_bytes: int | None = None) -> bool:
    """Empty a log file that has become long, after a copy to `<name>.1`; return whether it was.

    The process that writes goes on writing to the same file, at its end, if it opened that to append. Lines
    that it writes between the copy and the emptying are lost."""
    limit_bytes = LOG_BYTES if limit_bytes is None else limit_bytes
    if not file.exists() or file.stat().st_size < limit_bytes:
        return False
    shutil.copyfile(file, file.with_name(f"{file.name}.1"))
    os.truncate(file, 0)
    return True


def keep_newest(directory: Path, pattern: str, count: int) -> None:
    """Remove all but the `count` files by this pattern that were written to last."""
    ages: list[tuple[float, Path]] = []
    for path in directory.glob(pattern):
        try:
            ages.append((path.stat().st_mtime, path))
        except FileNotFoundError:  # another process removes them too
            continue
    ages.sort()
    for _, path in ages[: max(0, len(ages) - count)]:
        path.unlink(missing_ok=True)
