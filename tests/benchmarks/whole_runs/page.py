"""Puts the tables of a benchmark into a page of the documentation."""

import re
from pathlib import Path

from bus.errors import ConfigError


def refuse_without_place(file: Path, name: str) -> None:
    """Raise `ConfigError` for a page that cannot be read, or has no place for the tables of a benchmark."""
    between(_read(file), name, "")


def write_between(file: Path, name: str, tables: str) -> None:
    """Put the tables of a benchmark into their place in a page. Raises as `refuse_without_place` does."""
    from storage.disk.atomic_files import write_file  # not needed for --help

    write_file(file, between(_read(file), name, tables).encode())


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"--into {file}: {reason}. Give a Markdown file that is there") from error


def between(page: str, name: str, tables: str) -> str:
    """Return a page of Markdown with the tables of a benchmark in their place.

    Raises `ConfigError` if it has none."""
    place = re.compile(rf"(<!-- bench {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not place.search(page):
        raise ConfigError(f"--into: the file has no lines <!-- bench {name} --> and <!-- end -->: add them")
    return place.sub(lambda found: f"{found[1]}{tables}{found[2]}", page, count=1)
