"""Prompt data sets: reading and checking files, and an order of visits that one integer resumes."""

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bus.codec import MAX_ITEMS, Json, encode
from bus.errors import ConfigError
from bus.messages import Prompt, PromptSet
from storage.config import PromptKeys
from storage.disk.atomic_files import write_file
from storage.prompts.rows import Row, missing_key, read_rows

LEASE_BYTES = 1024
"""Room for what a lease carries besides its prompt."""
_MESSAGES = 'a text or a list of messages like {"role": "user", "content": "..."}'


def load_prompts(path: Path, keys: PromptKeys) -> list[Prompt]:
    """Read the prompts of a .jsonl or .parquet file, or of a slice of it: `file.jsonl@[a:b]`.

    Raises `ConfigError` naming the line (from 1) or row (from 0), what is wrong with it and what to do."""
    return [_prompt(row, keys) for row in read_rows(path)]


def save_prompts(path: Path, prompts: Iterable[Prompt]) -> None:
    """Replace `path` durably by a .jsonl file that `load_prompts` reads back with the default keys."""
    rows = ({"prompt": p.content, "label": p.label, "metadata": p.metadata} for p in prompts)
    write_file(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def encoded_prompts(prompts: Sequence[Prompt], source: str) -> bytes:
    """Return the message that carries the prompts of `source`. Raises `ConfigError` if they are too many."""
    if len(prompts) > MAX_ITEMS:
        raise ConfigError(
            f"{source}: {len(prompts)} prompts, and one message carries {MAX_ITEMS} at most: "
            f"give a slice of the file, such as prompts.jsonl@[:{MAX_ITEMS}]"
        )
    return encode(PromptSet(prompts=tuple(prompts)))


def refuse_large(prompts: Iterable[Prompt], source: str, *, largest_message: int) -> None:
    """Raise `ConfigError` for a prompt whose lease the bus would not carry, in messages of so many bytes."""
    for number, prompt in enumerate(prompts):
        size = len(encode(prompt))
        if size > largest_message - LEASE_BYTES:
            raise ConfigError(
                f"{source}: prompt {number} (from 0) has {size} bytes with its label and metadata, and "
                f"messages of this bus have {largest_message} at most: shorten it, or raise max_payload of "
                "nats-server"
            )


def prompt_content(row: Row, key: str) -> str | list[Json]:
    """Return the text or chat messages under `key`; raises `ConfigError` for anything else, or if empty."""
    content = row.required(key)
    if isinstance(content, str):
        empty = not content.strip()
    elif isinstance(content, list):
        empty = not content
        for position, message in enumerate(content):
            _check_message(f"{row.where}: message {position} of {key!r}", message)
    else:
        raise ConfigError(f"{row.where}: {key!r} is {_kind(content)}: make it {_MESSAGES}")
    if empty:
        raise ConfigError(f"{row.where}: {key!r} is empty: fill it or remove the row")
    return content


def _check_message(where: str, message: Json) -> None:
    if not isinstance(message, dict):
        raise ConfigError(f'{where} is {_kind(message)}: make it {{"role": ..., "content": ...}}')
    for key in ("role", "content"):
        if key not in message:
            raise ConfigError(f"{where}: {missing_key(key, message)}")
    if not (isinstance(message["role"], str) and message["role"]):
        raise ConfigError(f"{where}: its role is {_kind(message['role'])}: make it a text such as 'user'")
    if not (isinstance(message["content"], str | list) or message.get("tool_calls")):
        raise ConfigError(f"{where}: its content is {_kind(message['content'])}: make it a text")


def _prompt(row: Row, keys: PromptKeys) -> Prompt:
    prompt = Prompt(
        content=prompt_content(row, keys.prompt), label=_label(row, keys), metadata=_metadata(row, keys)
    )
    for column, value in ((keys.prompt, prompt.content), (keys.metadata, prompt.metadata)):
        if found := _not_json(column, value):
            raise ConfigError(
                f"{row.where}: {found}, which cannot be sent: use texts, booleans, 64-bit numbers, lists, "
                "objects (bytes as a base64 text, a time as an ISO text), or leave it out"
            )
    try:
        encode(prompt)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{row.where}: cannot be sent ({error}): use texts, booleans, 64-bit numbers, lists, objects"
        ) from error
    return prompt


def _not_json(column: str, value: object) -> str:
    """Return which value below `column` is none that JSON has, as Parquet's bytes and times are; or ''."""
    left = [(column, value)]
    while left:
        name, found = left.pop()
        if isinstance(found, dict):
            left += [(f"{name}.{key}", child) for key, child in found.items()]
        elif isinstance(found, list | tuple):
            left += [(f"{name}[{n}]", child) for n, child in enumerate(found)]
        elif not isinstance(found, str | bool | int | float | None):
            return f"{name!r} is {_kind(found)}"
    return ""


def _label(row: Row, keys: PromptKeys) -> str | None:
    value = _optional(row, keys.label, PromptKeys().label)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{row.where}: {keys.label!r} is {_kind(value)}: make it a text or a number")
    return str(value)


def _metadata(row: Row, keys: PromptKeys) -> dict[str, Json]:
    value = _optional(row, keys.metadata, PromptKeys().metadata)
    if value is not None and not isinstance(value, dict):
        raise ConfigError(
            f'{row.where}: {keys.metadata!r} is {_kind(value)}: make it an object {{"key": value}}'
        )
    return value or {}


def _optional(row: Row, key: str, default: str) -> Json:
    """Return the value of a key that may be absent unless the user named it."""
    return row.values.get(key) if key == default else row.required(key)


def _kind(value: object) -> str:
    """Return what an error message calls `value`."""
    if value == "":
        return "an empty text"
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null"}
    return names.get(
        type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}"
    )


class PromptOrder:
    """The endless sequence of epochs over `count` prompts, each in an order of its own drawn from `seed`."""

    def __init__(self, count: int, seed: int, shuffle: bool) -> None:
        if count < 1:
            raise ConfigError("no prompts to order: give at least one")
        self._count = count
        self.seed = seed
        self._shuffle = shuffle
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))

    def epoch(self, position: int) -> int:
        """Return the epoch of the position-th prompt."""
        return position // self._count

    def index(self, position: int) -> int:
        """Return the index of the position-th prompt, counted from 0 over all epochs."""
        epoch, place = divmod(position, self._count)
        if not self._shuffle:
            return place
        if self._order[0] != epoch:
            self._order = (epoch, self._permutation(epoch))
        return int(self._order[1][place])

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        # numpy keeps raw bit streams the same across versions, but not Generator.permutation
        keys = np.random.PCG64([self.seed, epoch]).random_raw(self._count)
        return np.argsort(keys, kind="stable")


@dataclass(frozen=True, slots=True)
class DataSet:
    """Prompts, and the leases that are issued for them: from `first_lease` on, until another takes over."""

    first_lease: int
    digest: str
    """Digest of the prompts in their order."""
    count: int
    seed: int
    shuffle: bool
    source: str
    """Origin of the prompts, for a human."""
    added: str = ""
    """Digest of prompts that were added while the run went on, so that adding twice adds once."""


class DataSetOrder:
    """Maps the number of a lease to a data set and a prompt in it, as a pure function."""

    def __init__(self, data_sets: Sequence[DataSet]) -> None:
        """Use `data_sets` in the order of their first leases, which begin at 0."""
        self._data_sets = data_sets
        self._orders = [PromptOrder(known.count, known.seed, known.shuffle) for known in data_sets]

    def find(self, lease_id: int) -> tuple[DataSet, int]:
        """Return the data set of a lease, and the index of its prompt there."""
        n = bisect_right(self._data_sets, lease_id, key=lambda known: known.first_lease) - 1
        found = self._data_sets[n]
        return found, self._orders[n].index(lease_id - found.first_lease)
