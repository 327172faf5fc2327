"""Addresses of trajectories on a disk, by which a reader on the same host maps them itself."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bus.errors import StorageError
from bus.requests import Located
from storage.disk.host_identity import host_identity
from storage.store.replay import ReplayStore


def directory_identity(directory: Path) -> tuple[int, int]:
    """Return device and inode of a directory, which identify it on its host under whatever mount. Raises
    `StorageError` when there is no such directory."""
    try:
        found = directory.stat()
    except OSError as error:
        raise StorageError(f"{directory} cannot be read here: {error}") from error
    return found.st_dev, found.st_ino


def locate(store: ReplayStore, lease_ids: Sequence[int]) -> Located:
    """Return the addresses of these complete groups, in the order of `ReplayStore.read`. Raises like it."""
    found = store.locate(lease_ids)
    numbers = {entry: n for n, entry in enumerate(dict.fromkeys(entry for entry, _ in found))}
    device, inode = directory_identity(store.directory)
    return Located(
        host=host_identity(),
        directory=str(store.directory.absolute()),
        device=device,
        inode=inode,
        segments=tuple(entry.name for entry in numbers),
        segment_of=np.array([numbers[entry] for entry, _ in found], np.int32),
        rows=np.array([row for _, row in found], np.int32),
    )
