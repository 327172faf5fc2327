"""Environments with packages of others."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PREPARE_S = 600.0


def prepared(directory: Path, packages: Sequence[str]) -> Path:
    """Return the interpreter of an environment with these packages, which is made unless it is there."""
    python, complete = directory / "bin/python", directory / "complete"
    if not complete.exists():
        subprocess.run([sys.executable, "-m", "venv", directory], check=True, timeout=120)
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
        subprocess.run(command, check=True, timeout=PREPARE_S)
        complete.touch()
    return python
