"""Requests to the processes that start programs, as JSON. Loads nothing but the standard library."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")


def to_json(request: "DataclassInstance") -> str:
    """Return a dataclass of plain values, tables and tuples as text for `from_json`."""
    return json.dumps(asdict(request))


def from_json(kind: type[T], text: str | bytes) -> T:
    """Return what `to_json` wrote of an instance of this class."""
    fields: dict[str, Any] = json.loads(text)
    return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()})
