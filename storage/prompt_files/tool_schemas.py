"""Reads the functions that a row of a prompt file offers to the model."""

import json

from bus.codec import Json
from bus.errors import ConfigError
from storage.prompt_files.rows import kind_of

_SHAPE = '{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}'
_REMEDY = f"write tools like {_SHAPE}, or name another field in data.keys.tools (an empty name reads none)"


def tool_schemas(value: Json, where: str) -> list[Json]:
    """Return the tools of a row: a list, or a JSON text of one; null and an empty text are none.

    Parquet and Arrow give every row the fields of all rows, with null where there was none: in a list, fields
    that are null are left out. A JSON text is taken as it is. Raises `ConfigError` for what is no function in
    the shape of OpenAI's.

    Args:
        value: what the row has.
        where: file, row and field, for the error.
    """
    if value is None or value == "":
        return []
    tools = _parsed(value, where) if isinstance(value, str) else _without_nulls(value)
    if not isinstance(tools, list):
        raise ConfigError(f"{where} is {kind_of(tools)}, not a list: {_REMEDY}")
    names = [_checked(tool, f"{where}: tool {number}") for number, tool in enumerate(tools)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{where} has two tools named {twice[0]!r}: name one otherwise")
    return tools


def _parsed(text: str, where: str) -> Json:
    try:
        tools: Json = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is a text that is no JSON ({error}), {text[:60]!r}: {_REMEDY}") from error
    return tools


def _without_nulls(value: Json) -> Json:
    if isinstance(value, dict):
        return {key: _without_nulls(child) for key, child in value.items() if child is not None}
    return [_without_nulls(child) for child in value] if isinstance(value, list) else value


def _checked(tool: Json, where: str) -> str:
    """Return the name of a tool; raises `ConfigError` for what is none."""
    if not isinstance(tool, dict):
        raise ConfigError(f"{where} is {kind_of(tool)}, not an object: {_REMEDY}")
    if (kind := tool.get("type")) != "function":
        raise ConfigError(f"{where} has the type {kind!r}, not 'function': {_REMEDY}")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise ConfigError(f"{where}: its function is {kind_of(function)}, not an object: {_REMEDY}")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: its name is {kind_of(name)}, not a text: {_REMEDY}")
    for key, wanted in (("description", str), ("parameters", dict)):
        found = function.get(key)
        if found is not None and not isinstance(found, wanted):
            raise ConfigError(f"{where}, {name!r}: its {key} is {kind_of(found)}: {_REMEDY}")
    return name
