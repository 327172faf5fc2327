"""What readers of tool calls share: calls as text, JSON in a text, and what is malformed."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn, TypeAlias

from actors.episodes.task import JSON
from actors.policy.messages import Tool

Parameters: TypeAlias = Mapping[str, Mapping[str, JSON]]
"""JSON schemas of parameters by name, of one tool."""
SPACE = re.compile(r"[ \t\r\n]*")
NAME_KEYS = "name", "tool_name"
ARGUMENT_KEYS = "arguments", "parameters"


class WrittenCall(NamedTuple):
    """A call of a tool as text."""

    name: str
    arguments: str


class Found(NamedTuple):
    """What a reader found."""

    end: int
    """Where the text goes on."""
    calls: tuple[WrittenCall, ...] = ()
    malformed: str = ""
    """What looked like a call and is none."""


class NoCallError(ValueError):
    """The text at hand is no tool call."""


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


DECODER = json.JSONDecoder(parse_constant=_refuse)
NOT_READ = (ValueError, RecursionError, SyntaxError)
"""What reading JSON or a literal raises, of whatever kind the text is."""


def skip(text: str, at: int) -> int:
    """Return where something other than space follows."""
    found = SPACE.match(text, at)
    return found.end() if found else at


def past(text: str, at: int, sign: str) -> int:
    """Return where the text goes on behind `sign` and space around it. Raises `NoCallError`."""
    at = skip(text, at)
    if not text.startswith(sign, at):
        raise NoCallError(f"there is no {sign!r} at character {at}")
    return skip(text, at + len(sign))


def members_as_text(text: str, at: int) -> tuple[dict[str, str], int]:
    """Read the JSON object that begins at `at`: the text of each value by key, and where the object ends."""
    members: dict[str, str] = {}
    at = past(text, at, "{")
    if text.startswith("}", at):
        return members, at + 1
    while True:
        key, at = DECODER.raw_decode(text, at)
        if not isinstance(key, str):
            raise NoCallError(f"the key {key!r} is no string")
        begin = past(text, at, ":")
        _, end = DECODER.raw_decode(text, begin)
        members[key] = text[begin:end]
        at = skip(text, end)
        if text.startswith("}", at):
            return members, at + 1
        at = past(text, at, ",")


def json_call(text: str, at: int) -> tuple[WrittenCall, int]:
    """Read {"name": ..., "arguments" or "parameters": ...}; arguments may be absent, or JSON in a string."""
    members, end = members_as_text(text, at)
    name = DECODER.decode(next((members[key] for key in NAME_KEYS if key in members), "null"))
    if not isinstance(name, str) or not name.strip():
        raise NoCallError("the call has no name")
    name.encode()  # half a surrogate pair cannot be sent anywhere: UnicodeEncodeError is a ValueError
    arguments = next((members[key] for key in ARGUMENT_KEYS if key in members), "{}")
    if arguments.startswith('"'):
        arguments = DECODER.decode(arguments)
    return WrittenCall(name, arguments), end


def json_calls(text: str, at: int) -> tuple[list[WrittenCall], int]:
    """Read one object of a call, several behind each other, or a list of them. Raises `ValueError`."""
    in_list = text.startswith("[", at)
    at = skip(text, at + 1) if in_list else at
    calls: list[WrittenCall] = []
    while text.startswith("{", at):
        call, at = json_call(text, at)
        calls.append(call)
        at = skip(text, at)
        if text.startswith((",", ";"), at):
            at = skip(text, at + 1)
    if not calls:
        raise NoCallError("there is no call")
    return calls, past(text, at, "]") if in_list else at


def typed(value: str, schema: Mapping[str, JSON]) -> JSON:
    """Return a value as its schema has it; text that cannot be read so stays text."""
    kind = schema.get("type", "string" if "anyOf" not in schema and "oneOf" not in schema else None)
    if kind == "string" or (isinstance(kind, Sequence) and not isinstance(kind, str) and "string" in kind):
        return value
    try:
        read: JSON = DECODER.decode(value.lower() if kind == "boolean" else value)
    except NOT_READ:
        return value
    return read


def malformed(text: str, at: int, opening: str, closing: str) -> Found:
    rest = text[at + len(opening) :]
    closed, reopened = rest.find(closing) if closing else -1, rest.find(opening)
    if closed >= 0 and (reopened < 0 or closed < reopened):
        end = closed + len(closing)
    else:
        end = reopened if reopened >= 0 else len(rest)
    end += at + len(opening)
    return Found(end, malformed=text[at:end])


def parameters_of(tools: Sequence[Tool]) -> Mapping[str, Parameters]:
    """Return the schemas of all parameters, by the name of their tool; what has none is left out."""
    return {name: parameters for name, parameters in map(_parameters, tools) if parameters}


def _parameters(tool: Tool) -> tuple[str, Parameters]:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return "", {}
    schema = function.get("parameters")
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        return "", {}
    named = {name: value for name, value in properties.items() if isinstance(value, Mapping)}
    return str(function.get("name")), named
