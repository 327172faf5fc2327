"""How models write tool calls, one reader for each way: text in, calls out, and what is no call.

A reader gets the text and where the opening of a call begins. What it cannot read it returns as malformed."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, TypeAlias

from actors.environments.base import JSON
from actors.policy.messages import Tool

Parameters: TypeAlias = Mapping[str, Mapping[str, JSON]]
"""JSON schemas of parameters by name, of one tool."""
SPACE = re.compile(r"[ \t\r\n]*")


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


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One way of writing tool calls."""

    openings: tuple[str, ...]
    """Texts by which calls begin."""
    read: Callable[[str, int, Mapping[str, Parameters]], Found]
    marks: tuple[str, ...] = ()
    """Further texts with a meaning; like openings, they may be special tokens."""
    bare: bool = False
    """An answer that begins with a JSON object may be a call, too."""


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


DECODER = json.JSONDecoder(parse_constant=_refuse)
NOT_READ = (ValueError, RecursionError)
"""What reading JSON raises, of whatever kind the text is."""


def _skip(text: str, at: int) -> int:
    """Return where something other than space follows."""
    found = SPACE.match(text, at)
    return found.end() if found else at


def _past(text: str, at: int, sign: str) -> int:
    """Return where the text goes on behind `sign` and space around it. Raises `NoCallError`."""
    at = _skip(text, at)
    if not text.startswith(sign, at):
        raise NoCallError(f"there is no {sign!r} at character {at}")
    return _skip(text, at + len(sign))


def _members(text: str, at: int) -> tuple[dict[str, str], int]:
    """Read the JSON object that begins at `at`: the text of each value by key, and where the object ends."""
    members: dict[str, str] = {}
    at = _past(text, at, "{")
    if text.startswith("}", at):
        return members, at + 1
    while True:
        key, at = DECODER.raw_decode(text, at)
        if not isinstance(key, str):
            raise NoCallError(f"the key {key!r} is no string")
        begin = _past(text, at, ":")
        _, end = DECODER.raw_decode(text, begin)
        members[key] = text[begin:end]
        at = _skip(text, end)
        if text.startswith("}", at):
            return members, at + 1
        at = _past(text, at, ",")


def _json_call(text: str, at: int) -> tuple[WrittenCall, int]:
    """Read {"name": ..., "arguments" or "parameters": ...}; arguments may be absent, or JSON in a string."""
    members, end = _members(text, at)
    name = DECODER.decode(members.get("name", "null"))
    if not isinstance(name, str) or not name.strip():
        raise NoCallError("the call has no name")
    name.encode()  # half a surrogate pair cannot be sent anywhere: UnicodeEncodeError is a ValueError
    arguments = members.get("arguments", members.get("parameters", "{}"))
    if arguments.startswith('"'):
        arguments = DECODER.decode(arguments)
    return WrittenCall(name, arguments), end


def _malformed(text: str, at: int, opening: str, closing: str) -> Found:
    """Return all up to the closing or to the next opening."""
    rest = text[at + len(opening) :]
    closed, reopened = rest.find(closing), rest.find(opening)
    if closed >= 0 and (reopened < 0 or closed < reopened):
        end = closed + len(closing)
    else:
        end = reopened if reopened >= 0 else len(rest)
    end += at + len(opening)
    return Found(end, malformed=text[at:end])


def read_hermes(text: str, at: int, _: Mapping[str, Parameters]) -> Found:
    """Read <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Hermes and Qwen write it.

    The end of the answer closes a whole call, too."""
    try:
        call, end = _json_call(text, _skip(text, at + len("<tool_call>")))
        end = _skip(text, end)
        return Found(end if end == len(text) else _past(text, end, "</tool_call>"), (call,))
    except NOT_READ:
        return _malformed(text, at, "<tool_call>", "</tool_call>")


FUNCTION = re.compile(r"(<tool_call>\s*)?<function=([^>\s]+)>\s*")
PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?")
VALUE_END = re.compile(r"\n?</parameter>\s*(?=<parameter=|</function>)")


def read_qwen3_coder(text: str, at: int, schemas: Mapping[str, Parameters]) -> Found:
    """Read <tool_call><function=name><parameter=key>value</parameter></function></tool_call>.

    Values are text; the tool's schema says which of them are numbers, booleans, lists or objects."""
    try:
        if not (begun := FUNCTION.match(text, at)):
            raise NoCallError("no function is named")
        name, arguments, end = begun[2], {}, begun.end()
        while found := PARAMETER.match(text, end):
            if not (closed := VALUE_END.search(text, found.end())):
                raise NoCallError(f"the parameter {found[1]} does not end")
            schema = schemas.get(name, {}).get(found[1], {})
            arguments[found[1]] = _typed(text[found.end() : closed.start()], schema)
            end = closed.end()
        end = _past(text, end, "</function>")
        if begun[1] and end < len(text):
            end = _past(text, end, "</tool_call>")
    except NOT_READ:
        closing = "</tool_call>" if text.startswith("<tool_call>", at) else "</function>"
        opening = "<tool_call>" if closing == "</tool_call>" else "<function="
        return _malformed(text, at, opening, closing)
    return Found(end, (WrittenCall(name, json.dumps(arguments, ensure_ascii=False)),))


def _typed(value: str, schema: Mapping[str, JSON]) -> JSON:
    """Return a value as its schema has it; text that cannot be read so stays text."""
    kind = schema.get("type", "string" if "anyOf" not in schema and "oneOf" not in schema else None)
    if kind == "string" or (isinstance(kind, Sequence) and not isinstance(kind, str) and "string" in kind):
        return value
    try:
        read: JSON = DECODER.decode(value.lower() if kind == "boolean" else value)
    except NOT_READ:
        return value
    return read


PYTHON_TAG = "<|python_tag|>"
LOOKS_LIKE_A_CALL = re.compile(r'\{\s*"(?:name|type|function)"\s*:')


def read_llama3(text: str, at: int, _: Mapping[str, Parameters]) -> Found:
    """Read {"name": ..., "parameters": {...}}, alone or behind <|python_tag|>, several divided by `;`.

    An answer that begins like a call is one or is malformed; any other JSON object is an answer. What else
    stands behind the tag, such as Python code, is malformed: no tool is named."""
    tagged = text.startswith(PYTHON_TAG, at)
    begin = _skip(text, at + len(PYTHON_TAG) if tagged else at)
    if not tagged and not LOOKS_LIKE_A_CALL.match(text, begin):
        return Found(at)
    calls: list[WrittenCall] = []
    end = begin
    try:
        if not tagged and not {"parameters", "arguments"}.intersection(_members(text, begin)[0]):
            return Found(at)  # an object that has a name for something else
        while True:
            call, end = _json_call(text, end)
            calls.append(call)
            end = _skip(text, end)
            if end == len(text) or text.startswith(PYTHON_TAG, end):
                return Found(end, tuple(calls))
            end = _past(text, end, ";")
            if end == len(text):
                return Found(end, tuple(calls))
    except NOT_READ:
        return Found(len(text), malformed=text[at:])


MISTRAL_NAME = re.compile(r"([^\[\]{}\s]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?(?=\{)")
TOOL_CALLS = "[TOOL_CALLS]"


def read_mistral(text: str, at: int, _: Mapping[str, Parameters]) -> Found:
    """Read [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...] or [TOOL_CALLS]name[ARGS]{...}."""
    begin = _skip(text, at + len(TOOL_CALLS))
    try:
        if named := MISTRAL_NAME.match(text, begin):
            _, end = DECODER.raw_decode(text, named.end())
            return Found(_skip(text, end), (WrittenCall(named[1], text[named.end() : end]),))
        calls: list[WrittenCall] = []
        end = _past(text, begin, "[")
        while True:
            call, end = _json_call(text, end)
            calls.append(call)
            end = _skip(text, end)
            if text.startswith("]", end):
                return Found(_skip(text, end + 1), tuple(calls))
            end = _past(text, end, ",")
    except NOT_READ:
        return _malformed(text, at, TOOL_CALLS, "</s>")


CALL_FORMATS: Mapping[str, CallFormat] = {
    "hermes": CallFormat(("<tool_call>",), read_hermes, ("</tool_call>",)),
    "qwen3_coder": CallFormat(
        ("<tool_call>", "<function="), read_qwen3_coder, ("</tool_call>", "</function>")
    ),
    "llama3": CallFormat((PYTHON_TAG,), read_llama3, bare=True),
    "mistral": CallFormat((TOOL_CALLS,), read_mistral, ("[ARGS]", "[CALL_ID]")),
}
SIGNS = {
    "<function=": "qwen3_coder",
    "<tool_call>": "hermes",
    TOOL_CALLS: "mistral",
    PYTHON_TAG: "llama3",
    '"parameters"': "llama3",
}
"""Texts of chat templates and the format of their models, the surest first."""


def call_format(template: str, named: str) -> CallFormat:
    """Return the format of that name, or the one that a chat template shows; "hermes" where it shows none."""
    if named != "auto":
        return CALL_FORMATS[named]
    return CALL_FORMATS[next((name for sign, name in SIGNS.items() if sign in template), "hermes")]


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
