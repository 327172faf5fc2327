"""Ledgers on disk."""

import shutil
from pathlib import Path


def on_disk(path: Path, copy: Path) -> Path:
    """What a crash at this moment would leave, as a ledger of its own."""
    for suffix in ("", "-wal"):
        if (source := path.with_name(path.name + suffix)).exists():
            shutil.copyfile(source, copy.with_name(copy.name + suffix))
    return copy
