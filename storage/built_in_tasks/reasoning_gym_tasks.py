"""Tasks of the package reasoning-gym as prompts: `data.task = "reasoning_gym/NAME"`."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from bus.codec import Json
from bus.errors import ConfigError

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


PREFIX = "reasoning_gym/"
KEY = "reasoning_gym"
"""Field of a prompt's metadata that holds the entry which the prompt asks, its answer included."""
MOST_ENTRY_BYTES = 128 << 10
"""Longest text of an entry: it travels with each lease of its prompt."""
Entry = dict[str, Any]
"""What the package knows of one question: `question`, `answer` and `metadata`."""


class EntryError(ValueError):
    """A prompt does not hold the entry that it asks; the message says what is wrong and what to do."""


def refuse_missing_package(what: str) -> None:
    """Raise `ConfigError` for `what` needs the package, where that is not installed."""
    if find_spec("reasoning_gym") is None:
        raise ConfigError(f"{what} needs the package reasoning-gym: pip install 'sluice-rl[reasoning-gym]'")


@lru_cache(maxsize=64)
def data_set(name: str, size: int, seed: int, **settings: int) -> Any:
    """Return a data set of reasoning-gym of these settings, whose entries are made when they are asked for.
    Raises `ConfigError` for one that does not exist, and where the package is missing."""
    refuse_missing_package(f"the data set {PREFIX}{name}")
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **settings)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(
            f"reasoning-gym has no data set {name!r} of {settings or 'default settings'}: {error}"
        ) from error


def prompt_rows(
    name: str,
    *,
    size: int,
    seed: int,
    besides: frozenset[str] = frozenset(),
    settings: Mapping[str, int] | None = None,
) -> Iterator[dict[str, Json]]:
    """Return `size` rows of a prompt file, with distinct questions that are not among `besides`.

    `settings` are the data set's own, by reasoning-gym's names; None leaves all as they are by default.

    Each row holds its entry: the package makes other entries of the same seed in another process, by its
    version and the seed of Python's hashes. There are fewer rows where the data set repeats itself too often.
    Raises as `data_set` does, and `ConfigError` for an entry that cannot be stored."""
    drawn = data_set(name, 2 * size, seed, **(settings or {}))
    seen = set(besides)
    for index in range(2 * size):
        if len(seen) - len(besides) == size:
            return
        entry = drawn[index]
        question, _ = str(entry["question"]), entry["answer"]
        if question not in seen:
            seen.add(question)
            label = None if entry["answer"] is None else str(entry["answer"])
            yield {"prompt": question, "label": label, "metadata": {KEY: stored_entry(name, entry)}}


def stored_entry(name: str, entry: Entry) -> dict[str, Json]:
    """Return what a prompt's metadata keep of an entry of the data set `name`. Raises `ConfigError` for an
    entry that is too long, or that would be another one when it is read."""
    try:
        text = exact_text(entry)
    except TypeError as error:
        raise ConfigError(
            f"{PREFIX}{name}: an entry cannot be stored with its prompt ({error}): choose another data set"
        ) from error
    if len(text) > MOST_ENTRY_BYTES:
        raise ConfigError(
            f"{PREFIX}{name}: an entry takes {len(text)} bytes, and {MOST_ENTRY_BYTES} are stored with a "
            "prompt at most: choose another data set"
        )
    return {"data_set": name, "package": version("reasoning-gym"), "entry": text}


def asked_entry(metadata: Mapping[str, object], *, prompt_text: str) -> tuple[str, Entry]:
    """Return the data set and the entry that a prompt asks; its question is to occur in `prompt_text`, all
    that the prompt says. Raises `EntryError` where there is none."""
    found = metadata.get(KEY)
    if not isinstance(found, Mapping):
        raise EntryError("it is none of reasoning-gym's: set data.task=reasoning_gym/NAME, or another reward")
    name = str(found.get("data_set"))
    where = f"its entry of {PREFIX}{name}"
    try:
        entry = exact_value(found["entry"])
        question, _ = str(entry["question"]), entry["answer"]
    except (LookupError, TypeError, ValueError) as error:
        raise EntryError(f"{where} cannot be read ({error!r}): write the prompts again") from error
    if question not in prompt_text:
        raise EntryError(
            f"its prompt does not ask what {where} asks, {question[:200]!r}: answers would be scored by "
            "another question; give the prompt as it was, or write the prompts again"
        )
    return name, entry
