"""Lets a test be another user than root, who may read and write everything."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def unprivileged() -> Iterator[None]:
    """Let this process be nobody: root may read everything."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@contextmanager
def public_directory() -> Iterator[Path]:
    """A directory that every user may enter, unlike that of pytest."""
    directory = Path(tempfile.mkdtemp(prefix="sluice-test-"))
    directory.chmod(0o755)
    try:
        yield directory
    finally:
        for path in (directory, *directory.iterdir()):
            path.chmod(0o755)
        shutil.rmtree(directory)
