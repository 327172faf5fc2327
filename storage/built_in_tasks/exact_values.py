"""Python values as JSON text that gives the same values back: tuples, sets and keys that are no texts too."""

import json
import math
from collections.abc import Iterable
from typing import Any

from bus.codec import Json

TAG = "$"
"""Key of an object that stands for a value which JSON does not have."""
_KINDS = {"tuple": tuple, "set": set, "frozenset": frozenset}
_LARGEST_INT = 2**53
"""Whole numbers beyond it are written as texts: many readers of JSON make floating-point numbers of them."""


def exact_text(value: object) -> str:
    """Return the text of a value. Raises `TypeError`, which names the place, for what cannot be given back.

    NumPy's texts and numbers that Python's own classes hold count as Python's."""
    return json.dumps(_written(value, "it"), separators=(",", ":"), allow_nan=False)


def exact_value(text: str) -> Any:
    """Return the value of a text of `exact_text`. Raises `ValueError` for another text."""
    try:
        return _read(json.loads(text))
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"the text was not made by exact_text: {error!r}") from error


def _written(value: object, place: str) -> Json:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value) if abs(value) <= _LARGEST_INT else {TAG: "int", "of": hex(value)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {TAG: "float", "of": str(float(value))}
    if type(value) is list:
        return [_written(one, f"{place}[{n}]") for n, one in enumerate(value)]
    if type(value) is dict:
        return _object(value, place)
    for name, kind in _KINDS.items():
        if type(value) is kind and isinstance(value, Iterable):
            parts: list[Json] = [_written(one, f"{place}[{n}]") for n, one in enumerate(value)]
            return {TAG: name, "of": parts if kind is tuple else sorted(parts, key=json.dumps)}
    raise TypeError(f"{place} is of {type(value).__module__}.{type(value).__qualname__}: {str(value)[:80]!r}")


def _object(value: dict[object, object], place: str) -> Json:
    if TAG not in value and all(isinstance(key, str) for key in value):
        return {str(key): _written(one, f"{place}.{key}") for key, one in value.items()}
    pairs: list[Json] = [
        [_written(key, f"a key of {place}"), _written(one, f"{place}[{key!r}]")] for key, one in value.items()
    ]
    return {TAG: "dict", "of": pairs}


def _read(value: Json) -> Any:
    if isinstance(value, list):
        return [_read(one) for one in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: _read(one) for key, one in value.items()}
    kind, held = value[TAG], value["of"]
    if kind == "int":
        return int(str(held), 16)
    if kind == "float":
        return float(str(held))
    parts = _read(held)
    return dict(parts) if kind == "dict" else _KINDS[str(kind)](parts)
