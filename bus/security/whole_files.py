"""Writes files whole: a reader sees the old content or the new one."""

import os
import secrets
from pathlib import Path


def write_whole(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Replace a file by `data`, with the permissions `mode` from the beginning, less what the umask takes.
    Processes with one number, of containers, may write the same file: the temporary one has a random name."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_secret(path: Path, data: bytes) -> None:
    """Replace a file that its owner alone may read."""
    write_whole(path, data, mode=0o600)
