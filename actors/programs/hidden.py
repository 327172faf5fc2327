"""Files of this host that no program of an agent may see: what the process that starts an actor knows of."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_hidden: set[Path] = set()


def hide(paths: Iterable[Path]) -> None:
    """Hide these files and directories from every program that is started from now on. One that does not
    exist yet is hidden from the programs that start once it exists."""
    _hidden.update(path.absolute() for path in paths)


def hidden_paths() -> frozenset[Path]:
    """Return what exists by now of what is hidden, and what links in hidden directories lead to."""
    return frozenset(found for path in _hidden for found in _existing(path))


def _existing(path: Path) -> Iterator[Path]:
    with suppress(PermissionError):  # a program may not look either where this process may not
        if path.exists():
            yield path
        if path.is_dir():
            targets = (entry.resolve() for entry in path.iterdir() if entry.is_symlink() and entry.exists())
            yield from (target for target in targets if not path.resolve().is_relative_to(target))
