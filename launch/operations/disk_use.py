"""The room that files take, while a run may write and remove them."""

import os
from contextlib import suppress
from pathlib import Path


def bytes_of(path: Path) -> int:
    """Return the size of a file, or of all files below a directory, in bytes.

    What vanishes meanwhile, or cannot be read, does not count."""
    if not path.is_dir():
        return _size(path)
    return sum(_size(Path(above) / name) for above, _, files in os.walk(path) for name in files)


def _size(file: Path) -> int:
    with suppress(OSError):
        return file.stat().st_size
    return 0
