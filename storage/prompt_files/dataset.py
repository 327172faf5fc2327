"""Prompt files: reading and checking them."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import isfinite
from pathlib import Path

from bus.codec import MAX_ITEMS, Json, decode, encode
from bus.errors import ConfigError, SchemaError
from bus.evaluation_messages import PromptSet
from bus.messages import Prompt
from storage.images.encoded import ImageError, ImageFiles, embedded, named_files
from storage.prompt_files.hub_data import fetch_images
from storage.prompt_files.rows import Row, kind_of, missing_key, own_rows, read_rows
from storage.prompt_files.stored_prompts import StoredPrompts
from storage.settings.data import PromptKeys

LEASE_BYTES = 1024
"""Room for what a lease carries besides its prompt."""
IMAGES_COLUMN = "images"
"""Column of the images of a row, for parts of its messages that name none."""
_MESSAGES = 'a text or a list of messages like {"role": "user", "content": "..."}'
_TOOL_SHAPE = '{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}'
_TOOLS_REMEDY = (
    f"write tools like {_TOOL_SHAPE}, or name another field in data.keys.tools (an empty name reads none)"
)


def load_prompts(path: Path, keys: PromptKeys) -> list[Prompt]:
    """Return all that `each_prompt` reads."""
    return list(each_prompt(path, keys))


def each_prompt(path: Path, keys: PromptKeys, images: set[Path] | None = None) -> Iterator[Prompt]:
    """Read the prompts of a .jsonl or .parquet file one by one, or of a slice of it: `file.jsonl@[a:b]`.

    Files of images that are read for them are added to `images`. Raises `ConfigError` naming the line or row,
    what is wrong with it and what to do."""
    read = set() if images is None else images
    fetch = partial(fetch_images, named=partial(_named_images, path, keys))
    return (_prompt(row, keys, read, fetch) for row in read_rows(path))


def streamed_prompts(source: Path, keys: PromptKeys, position: int = 0) -> Iterator[Prompt]:
    """Return the prompts that a function of the user's own yields, from its row `position` on."""
    rows = (Row(where, values) for where, values in own_rows(source, position))
    return (_prompt(row, keys, set(), fetch_images) for row in rows)


def _named_images(path: Path, keys: PromptKeys) -> Iterator[Path]:
    for row in read_rows(path):
        for name in named_files(row.values.get(keys.prompt), row.values.get(IMAGES_COLUMN)):
            yield row.directory / name


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
    if isinstance(prompts, StoredPrompts) and prompts.largest_bytes <= largest_message - LEASE_BYTES:
        return
    for number, prompt in enumerate(prompts, 1):
        size = len(encode(prompt))
        if size > largest_message - LEASE_BYTES:
            raise ConfigError(
                f"{source}: prompt {number} has {size} bytes with its label and metadata, and "
                f"messages of this bus have {largest_message} at most: shorten it, or raise max_payload of "
                "nats-server"
            )


def prompt_content(
    row: Row, key: str, images: set[Path] | None = None, fetch: Callable[[Path], None] = fetch_images
) -> str | list[Json]:
    """Return the text or chat messages under `key`, with images in them as data URIs.

    Files of images that it reads are added to `images`; `fetch` gets one that is not here. Raises
    `ConfigError` for anything else, for nothing, and for images that cannot be read."""
    content = row.required(key)
    if isinstance(content, str):
        empty = not content.strip()
    elif isinstance(content, list):
        empty = not content
        for position, message in enumerate(content):
            _check_message(f"{row.where}: message {position} of {key!r}", message)
        content = [_said(message, has_all_fields=row.has_all_fields) for message in content]
    else:
        raise ConfigError(f"{row.where}: {key!r} is {kind_of(content)}: make it {_MESSAGES}")
    if empty:
        raise ConfigError(f"{row.where}: {key!r} is empty: fill it or remove the row")
    column = row.values.get(IMAGES_COLUMN)
    if isinstance(content, str) and not (isinstance(column, list) and column):
        return content
    chat: list[Json] = [{"role": "user", "content": content}] if isinstance(content, str) else content
    files = ImageFiles(row.directory, set() if images is None else images, fetch)
    try:
        return embedded(chat, files, column)
    except ImageError as error:
        raise ConfigError(f"{row.where}: {key!r}: {error}") from error


def _check_message(where: str, message: Json) -> None:
    if not isinstance(message, dict):
        raise ConfigError(f'{where} is {kind_of(message)}: make it {{"role": ..., "content": ...}}')
    calls = message.get("tool_calls")
    for key in ("role", *(() if calls else ("content",))):  # OpenAI's answers of calls need not have any
        if key not in message:
            raise ConfigError(f"{where}: {missing_key(key, message)}")
    if not (isinstance(message["role"], str) and message["role"]):
        raise ConfigError(f"{where}: its role is {kind_of(message['role'])}: make it a text such as 'user'")
    if not (calls or isinstance(message["content"], str | list)):
        raise ConfigError(f"{where}: its content is {kind_of(message['content'])}: make it a text")


def _said(message: Json, *, has_all_fields: bool) -> Json:
    """Return a message without the fields that are null, which templates take for a field that is there. In
    an object of a file whose rows have all fields, no null says anything."""
    assert isinstance(message, dict), "it was checked"
    given = {key: value for key, value in message.items() if value is not None or key == "content"}
    return {key: _without_nulls(value) for key, value in given.items()} if has_all_fields else given


def _prompt(row: Row, keys: PromptKeys, images: set[Path], fetch: Callable[[Path], None]) -> Prompt:
    prompt = Prompt(
        content=prompt_content(row, keys.prompt, images, fetch),
        label=_label(row, keys),
        metadata=_metadata(row, keys),
        tools=_tools(row, keys),
    )
    columns = {keys.prompt: prompt.content, keys.metadata: prompt.metadata, keys.tools: prompt.tools}
    for column, value in columns.items():
        if found := _not_json(column, value):
            raise ConfigError(
                f"{row.where}: {found}, which cannot be sent: use texts, booleans, 64-bit numbers, lists, "
                "objects (bytes as a base64 text, a time as an ISO text), or leave it out"
            )
    try:
        decode(encode(prompt), Prompt)  # whoever gets a lease that he refuses asks for it again and again
    except (SchemaError, TypeError, ValueError, OverflowError) as error:
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
            return f"{name!r} is {kind_of(found)}"
    return ""


def _label(row: Row, keys: PromptKeys) -> str | None:
    value = _optional(row, keys.label, PromptKeys().label)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{row.where}: {keys.label!r} is {kind_of(value)}: make it a text or a number")
    if not isfinite(value):
        raise ConfigError(
            f"{row.where}: {keys.label!r} is the number {value}, as pandas writes one that is missing: give "
            "a text or a finite number, or null"
        )
    return str(value)


def _metadata(row: Row, keys: PromptKeys) -> dict[str, Json]:
    value = _optional(row, keys.metadata, PromptKeys().metadata)
    if value is not None and not isinstance(value, dict):
        raise ConfigError(
            f'{row.where}: {keys.metadata!r} is {kind_of(value)}: make it an object {{"key": value}}'
        )
    return value or {}


def _tools(row: Row, keys: PromptKeys) -> list[Json]:
    if not keys.tools:
        return []
    value = _optional(row, keys.tools, PromptKeys().tools)
    return tool_schemas(value, f"{row.where}: {keys.tools!r}")


def _optional(row: Row, key: str, default: str) -> Json:
    return row.values.get(key) if key == default else row.required(key)


def tool_schemas(value: Json, where: str) -> list[Json]:
    """Return the tools of a row: a list, or a JSON text of one; null and an empty text are none.

    Parquet and Arrow give every row the fields of all rows, with null where there was none: in a list, fields
    that are null are left out. A JSON text is taken as it is. Raises `ConfigError` for what is no function in
    the shape of OpenAI's.

    Args:
        value: what the row has.
        where: file, row and field, for the error."""
    if value is None or value == "":
        return []
    tools = _parsed_tools(value, where) if isinstance(value, str) else _without_nulls(value)
    if not isinstance(tools, list):
        raise ConfigError(f"{where} is {kind_of(tools)}, not a list: {_TOOLS_REMEDY}")
    names = [_checked_tool(tool, f"{where}: tool {number}") for number, tool in enumerate(tools)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{where} has two tools named {twice[0]!r}: name one otherwise")
    return tools


def _parsed_tools(text: str, where: str) -> Json:
    try:
        tools: Json = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{where} is a text that is no JSON ({error}), {text[:60]!r}: {_TOOLS_REMEDY}"
        ) from error
    return tools


def _without_nulls(value: Json) -> Json:
    if isinstance(value, dict):
        return {key: _without_nulls(child) for key, child in value.items() if child is not None}
    return [_without_nulls(child) for child in value] if isinstance(value, list) else value


def _checked_tool(tool: Json, where: str) -> str:
    if not isinstance(tool, dict):
        raise ConfigError(f"{where} is {kind_of(tool)}, not an object: {_TOOLS_REMEDY}")
    if (kind := tool.get("type")) != "function":
        raise ConfigError(f"{where} has the type {kind!r}, not 'function': {_TOOLS_REMEDY}")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise ConfigError(f"{where}: its function is {kind_of(function)}, not an object: {_TOOLS_REMEDY}")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: its name is {kind_of(name)}, not a text: {_TOOLS_REMEDY}")
    for key, wanted in (("description", str), ("parameters", dict)):
        found = function.get(key)
        if found is not None and not isinstance(found, wanted):
            raise ConfigError(f"{where}, {name!r}: its {key} is {kind_of(found)}: {_TOOLS_REMEDY}")
    return name


def is_trained(message: Json) -> bool:
    """Return whether a message of a chat is an answer to train on: `weight` 0 leaves it out, as OpenAI's
    format of fine-tuning has it."""
    return isinstance(message, dict) and message.get("role") == "assistant" and message.get("weight") != 0
