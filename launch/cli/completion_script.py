"""The completion scripts of shells, made from the commands and the tree of settings.

cyclopts can write one as well: of 500 settings in a dozen commands it makes 0.9 MB, in 15 s."""

import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from cyclopts import App, Parameter
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from launch.cli.app import app
from launch.cli.completion_shells import BASH, FISH, ZSH
from launch.cli.settings_help import flag
from launch.recipes.recipe import recipe_names
from launch.settings.run_config import preset_names
from launch.settings.tree import Model, members, tag_of

Table = Mapping[str, list[str]]


def script(shell: str) -> str:
    """Return the script: what may follow each command, and the values of each flag that has only some.

    A value that it does not know is completed as a file's name."""
    text, write = SHELLS[shell]
    words, values = _tables()
    return text.replace("@WORDS@", write(words)).replace("@VALUES@", write(values))


def _bash_table(entries: Table) -> str:
    """Return the lines of an associative array of bash."""
    return "\n".join(f"  ['{key}']='{' '.join(words)}'" for key, words in entries.items())


def _zsh_table(entries: Table) -> str:
    """Return the lines of an associative array of zsh."""
    return "\n".join(f"    '{key}' '{' '.join(words)}'" for key, words in entries.items())


def _fish_table(entries: Table) -> str:
    """Return the cases of a switch of fish, each of which prints words."""
    return "\n".join(
        f"        case '{key}'\n            echo {' '.join(words)}" for key, words in entries.items()
    )


SHELLS = {"bash": (BASH, _bash_table), "zsh": (ZSH, _zsh_table), "fish": (FISH, _fish_table)}
"""Script of each shell, and what writes a table for it."""


def _tables() -> tuple[Table, Table]:
    """Return what may follow each command, and the values of each flag that has only some."""
    words, values = {"launch": _names(app)}, dict(_fixed_values())
    for path, command in _commands(app, ""):
        if command.default_command is None:
            words[path] = _names(command)
            continue
        flags = dict(_flags(command))
        words[path] = [*flags, "--help"]
        values |= {name: found for name, found in flags.items() if found}
    return _each_once(words), _each_once(values)


def _each_once(entries: Table) -> Table:
    return {key: list(dict.fromkeys(words)) for key, words in entries.items()}


def _commands(above: App, path: str) -> Iterator[tuple[str, App]]:
    for name in _names(above):
        command = above[name]
        yield f"{path}{name}", command
        if command.default_command is None:
            yield from _commands(command, f"{path}{name} ")


def _names(command: App) -> list[str]:
    return [name for name in command if not name.startswith("-")]


def _flags(command: App) -> Iterator[tuple[str, list[str]]]:
    """Yield the flags of a command, each with its values if it has only some."""
    function = command.default_command
    assert function is not None
    for name, hint in get_type_hints(function, include_extras=True).items():
        parameter = inspect.signature(function).parameters.get(name)
        if parameter is None or parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        named = next((p for p in get_args(hint) if isinstance(p, Parameter) and p.name), None)
        kind = get_args(hint)[0] if named is not None else hint
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _settings(kind, () if named is not None else (name,))
        elif named is not None and named.name == ("*",):
            yield from (("--log-level", []), ("--log-format", []))
        else:
            flags = named.name if named is not None else (flag(name),)
            yield from ((one, _choices(kind)) for one in flags or ())


@cache
def _settings(root: Model, above: tuple[str, ...]) -> tuple[tuple[str, list[str]], ...]:
    """Return the flag of each setting below a table, with its values."""
    found: dict[str, list[str]] = {}
    for name, field in root.model_fields.items():
        here = (*above, name)
        tables = members(field.annotation)
        if not tables:
            found |= _plain(here, field)
        elif get_origin(field.annotation) not in (tuple, dict):  # which are given in files only
            kinds = [tag_of(table) for table in tables if tag_of(table)]
            if kinds:
                found[flag(".".join((*here, "type")))] = kinds
            for table in tables:
                found |= {k: v for k, v in _settings(table, here) if not k.endswith(".type") or v}
    return tuple(found.items())


def _plain(location: tuple[str, ...], field: FieldInfo) -> dict[str, list[str]]:
    if location[-1] == "type" and len(location) > 1:
        return {}  # that of the whole union has all of them
    found = {flag(".".join(location)): _choices(field.annotation)}
    if field.annotation is bool:
        found[flag(".".join((*location[:-1], f"no_{location[-1]}")))] = []
    return found


def _choices(annotation: Any) -> list[str]:
    """Return the values of a setting that has only some."""
    kinds = (annotation, *get_args(annotation))
    return [str(one) for kind in kinds if get_origin(kind) is Literal for one in get_args(kind)]


def _fixed_values() -> Iterator[tuple[str, list[str]]]:
    """Yield the values of flags whose types do not tell them."""
    yield "--preset", preset_names()
    yield "--recipe", recipe_names()
    yield "--log-level", ["debug", "info", "warning", "error"]
    yield "--log-format", ["text", "json"]
