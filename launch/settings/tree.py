"""The settings as a tree of pydantic models: which there are at a place, and what may stand there."""

import ast
import inspect
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from bus.config import Config

Model = type[BaseModel]


@cache
def describe(table: Model) -> None:
    """Make the docstring under each setting of a table, and of the tables below it, its description."""
    for parent in reversed([parent for parent in table.__mro__ if issubclass(parent, Config)]):
        for name, text in _docstrings(parent.__module__).get(parent.__qualname__, {}).items():
            if name in table.model_fields:
                table.model_fields[name].description = text
    for field in table.model_fields.values():
        for below in members(field.annotation):
            describe(below)


@cache
def _docstrings(module: str) -> Mapping[str, Mapping[str, str]]:
    """Return the docstring under each attribute of the classes in a module, by class and attribute."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {
        found.name: {
            field.target.id: inspect.cleandoc(text.value.value)
            for field, text in pairwise(found.body)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        }
        for found in tree.body if isinstance(found, ast.ClassDef)
    }  # fmt: skip


def settings_at(root: Model, location: Iterable[str]) -> Mapping[str, FieldInfo]:
    """Return the settings in the table at `location`; in a union those of the member it names, or of all.
    Empty where `location` leads to no table."""
    section: Any = root
    for part in location:
        if get_origin(section) is dict:  # the part is a name of the user's
            section = get_args(section)[1]
            continue
        found = members(section)
        fields = {name: field for member in found for name, field in member.model_fields.items()}
        section = fields[part].annotation if part in fields else _tagged(found, part)
    return {name: field for member in members(section) for name, field in member.model_fields.items()}


def members(annotation: Any) -> list[Model]:
    """Return the table that a setting is, or each table of a union; nothing for a plain value."""
    return [
        member
        for member in (annotation, *get_args(annotation))
        if isinstance(member, type) and issubclass(member, BaseModel)
    ]


def tag_of(member: Model) -> str:
    """Return the `type` that chooses a member of a union; empty for a table that is none."""
    field = member.model_fields.get("type")
    return str(get_args(field.annotation)[0]) if field is not None else ""


def with_lists(root: Model, table: Mapping[str, Any], above: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a table in which each text that is given for a list is one: a JSON list, or parts with commas
    between them. A flag that is no setting of cyclopts' own, as below a name, has a text alone."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        field = settings_at(root, above).get(name)
        if isinstance(value, Mapping):
            found[name] = with_lists(root, value, (*above, name))
        elif isinstance(value, str) and field is not None and _is_list(field.annotation):
            found[name] = _parts(value)
        else:
            found[name] = value
    return found


def _is_list(annotation: Any) -> bool:
    return any(get_origin(kind) in (list, tuple) for kind in (annotation, *get_args(annotation)))


def _parts(text: str) -> list[Any]:
    if text.startswith("["):
        try:
            listed: list[Any] = json.loads(text)
        except ValueError:
            pass  # parts may begin so, as patterns do
        else:
            return listed
    return [part.strip() for part in text.split(",")]


def may_be_none(root: Model, location: Sequence[str]) -> bool:
    """Return whether there is such a setting, which may have no value."""
    field = settings_at(root, location[:-1]).get(location[-1])
    return field is not None and type(None) in get_args(field.annotation)


def file_keys(root: Model, location: Sequence[str]) -> Iterator[str]:
    """Return `location` as a file has it: pydantic inserts the `type` that chose a member of a union."""
    for n, part in enumerate(location):
        last, named = n == len(location) - 1, n > 0 and _is_by_name(root, location[:n])
        if last or named or part in settings_at(root, location[:n]):
            yield part


def _is_by_name(root: Model, location: Sequence[str]) -> bool:
    field = settings_at(root, location[:-1]).get(location[-1])
    return field is not None and get_origin(field.annotation) is dict


def _tagged(found: Iterable[Model], tag: str) -> Any:
    return next((member for member in found if tag_of(member) == tag), None)
