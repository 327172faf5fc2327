"""Files of this host that no program of an agent may see: what the process that starts an actor knows of."""

from collections.abc import Iterable
from pathlib import Path

_hidden: set[Path] = set()


def hide(paths: Iterable[Path]) -> None:
    """Hide what is there of these files and directories from every program that is started from now on."""
    _hidden.update(path.resolve() for path in paths if path.exists())


def hidden_paths() -> frozenset[Path]:
    """Return what is hidden."""
    return frozenset(_hidden)
