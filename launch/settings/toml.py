"""Settings written as TOML, one on a line with a comment after it."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tomli_w

from launch.settings.sources import Location

NO_VALUE = "none"
"""What stands for no value in a file and in a flag: TOML has no null."""
COMMENT_COLUMN = 44
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
Write = Callable[[Location, Any], Iterator[str]]


def document(table: Mapping[str, Any], write: Write, above: Location = ()) -> Iterator[str]:
    """Yield the lines of a document: the plain settings of a table, then each table below it. `write` yields
    the lines of one plain setting."""
    tables: dict[str, Any] = {}
    for key, value in table.items():
        if (isinstance(value, Mapping) and value) or _several_tables(value):
            tables[key] = value
        else:
            yield from write((*above, key), value)
    for key, value in tables.items():
        name = ".".join(map(_key, (*above, key)))
        for one in value if isinstance(value, list) else [value]:
            yield ""
            yield f"[[{name}]]" if isinstance(value, list) else f"[{name}]"
            yield from document(one, write, (*above, key))


def setting(name: str, value: Any) -> str:
    return f"{_key(name)} = {_text(NO_VALUE if value is None else value)}"


def assignment(location: Location, value: Any) -> str:
    """Return the line that gives a setting its value outside of any table."""
    return f"{'.'.join(map(_key, location))} = {_text(NO_VALUE if value is None else value)}"


def commented(line: str, comment: str) -> str:
    """Return a line with a comment after it, in the column of the others where there is room."""
    return f"{line:<{COMMENT_COLUMN}}  # {comment}"


def _several_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) and one for one in value)


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else _text(name)


def _text(value: Any) -> str:
    """Return a value as TOML has it, on one line: the library breaks arrays."""
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(key)} = {_text(one)}" for key, one in value.items() if one is not None)
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(one) for one in value if one is not None)}]"
    return tomli_w.dumps({"value": value}).removeprefix("value = ").rstrip("\n")
