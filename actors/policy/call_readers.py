"""General readers of tool calls: JSON, JSON behind a name, parameters in tags, and calls of functions. A
reader gets the text and where the opening of a call begins. What it cannot read it returns as malformed."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from actors.episodes.task import JSON
from actors.policy.literals import Reader, gemma_value, members, python_value
from actors.policy.reading import (
    DECODER,
    NOT_READ,
    Found,
    NoCallError,
    Parameters,
    WrittenCall,
    json_calls,
    malformed,
    past,
    skip,
    typed,
)

Schemas = Mapping[str, Parameters]


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Reads {"name": ..., "arguments": {...}} between two marks, one object, several or a list of them."""

    opening: str
    closing: str = ""
    """Ends the calls, as the end of the answer does; nothing where a list ends itself."""
    must_close: bool = True
    """Only the closing and the end of the answer end the calls."""

    def __call__(self, text: str, at: int, schemas: Schemas) -> Found:
        try:
            calls, end = json_calls(text, skip(text, at + len(self.opening)))
            end = skip(text, end)
            if self.closing and end < len(text) and (self.must_close or text.startswith(self.closing, end)):
                end = past(text, end, self.closing)
            return Found(end, tuple(calls))
        except NOT_READ:
            return malformed(text, at, self.opening, self.closing)


@dataclass(frozen=True, slots=True)
class NamedJson:
    """Reads JSON arguments behind a name."""

    opening: str
    head: re.Pattern[str]
    """What stands before the arguments; its group `name` is the tool's."""
    tail: re.Pattern[str] = re.compile("")
    """What stands behind the arguments."""
    closing: str = ""

    def __call__(self, text: str, at: int, schemas: Schemas) -> Found:
        try:
            if not (begun := self.head.match(text, at)):
                raise NoCallError("no function is named")
            _, end = DECODER.raw_decode(text, begun.end())
            if not (ended := self.tail.match(text, end)):
                raise NoCallError("the call does not end")
        except NOT_READ:
            return malformed(text, at, self.opening, self.closing)
        call = WrittenCall(begun["name"], text[begun.end() : end])
        return Found(skip(text, ended.end()), (call,))


@dataclass(frozen=True, slots=True)
class TaggedParameters:
    """Reads parameters in tags, whose values are text. The tool's schema says which of them are numbers,
    booleans, lists or objects, unless a tag does."""

    opening: str
    head: re.Pattern[str]
    """What stands before the parameters; its group `name` is the tool's."""
    parameter: re.Pattern[str]
    """What stands before a value; its group `key` is its name, `text` "false" where it is JSON."""
    value_end: re.Pattern[str]
    """What stands behind a value, with what has to follow it."""
    tail: re.Pattern[str]
    closing: str

    def __call__(self, text: str, at: int, schemas: Schemas) -> Found:
        try:
            if not (begun := self.head.match(text, at)):
                raise NoCallError("no function is named")
            name, arguments, end = begun["name"], dict[str, JSON](), begun.end()
            while found := self.parameter.match(text, end):
                if not (closed := self.value_end.search(text, found.end())):
                    raise NoCallError(f"the parameter {found['key']} does not end")
                schema = _schema(found, schemas.get(name, {}))
                arguments[found["key"]] = typed(text[found.end() : closed.start()], schema)
                end = closed.end()
            if not (ended := self.tail.match(text, end)):
                raise NoCallError("the call does not end")
        except NOT_READ:
            return malformed(text, at, self.opening, self.closing)
        call = WrittenCall(name, json.dumps(arguments, ensure_ascii=False))
        return Found(skip(text, ended.end()), (call,))


def _schema(found: re.Match[str], schemas: Parameters) -> Mapping[str, JSON]:
    is_text = found.groupdict().get("text")
    return {"type": "string" if is_text == "true" else "json"} if is_text else schemas.get(found["key"], {})


CALLED = re.compile(r"([A-Za-z_][\w.\-]*)\s*\(")


def function_calls(text: str, at: int, read: Reader) -> tuple[list[WrittenCall], int]:
    """Read name(key=value, ...), several divided by commas or lines, or a list. Raises `ValueError`."""
    in_list = text.startswith("[", at)
    at = skip(text, at + 1) if in_list else at
    calls: list[WrittenCall] = []
    while begun := CALLED.match(text, at):
        arguments, at = members(text, begun.end(), read, between="=", closing=")")
        calls.append(WrittenCall(begun[1], json.dumps(arguments, ensure_ascii=False)))
        at = skip(text, at)
        if text.startswith(",", at):
            at = skip(text, at + 1)
    if not calls:
        raise NoCallError("there is no call")
    return calls, past(text, at, "]") if in_list else at


@dataclass(frozen=True, slots=True)
class FunctionCalls:
    """Reads [name(key=value, ...), ...] between two marks."""

    opening: str
    closing: str
    read: Reader = field(default=python_value)

    def __call__(self, text: str, at: int, schemas: Schemas) -> Found:
        try:
            calls, end = function_calls(text, skip(text, at + len(self.opening)), self.read)
            end = skip(text, end)
            return Found(end if end == len(text) else past(text, end, self.closing), tuple(calls))
        except NOT_READ:
            return malformed(text, at, self.opening, self.closing)


GEMMA_CALL = re.compile(r"<\|tool_call>\s*call:([^{\s]+)\{")


def read_gemma(text: str, at: int, _: Schemas) -> Found:
    """Read <|tool_call>call:name{key:<|"|>text<|"|>,number:3}<tool_call|>."""
    try:
        if not (begun := GEMMA_CALL.match(text, at)):
            raise NoCallError("no function is named")
        arguments, end = members(text, begun.end(), gemma_value, between=":", closing="}")
        end = skip(text, end)
        end = end if end == len(text) else past(text, end, "<tool_call|>")
        return Found(end, (WrittenCall(begun[1], json.dumps(arguments, ensure_ascii=False)),))
    except NOT_READ:
        return malformed(text, at, "<|tool_call>", "<tool_call|>")


PYTHON_TAG, PYTHON_START, PYTHON_END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"
LLAMA_TAGS = PYTHON_TAG, PYTHON_START
LOOKS_LIKE_A_CALL = re.compile(r'\{\s*"(?:name|type|function)"\s*:')
HAS_ARGUMENTS = re.compile(r'"(?:parameters|arguments)"\s*:')
LOOKS_LIKE_FUNCTIONS = re.compile(r"\[\s*[A-Za-z_][\w.]*\((?:\)|\s*[A-Za-z_]\w*\s*=)")


def read_llama(text: str, at: int, _: Schemas) -> Found:
    """Read {"name": ..., "parameters": {...}} or [name(key=value)], alone or behind a tag. An answer that
    begins like a call is one or is malformed; any other JSON is an answer. What else stands behind a tag,
    such as Python code, is malformed: no tool is named."""
    tag = next((tag for tag in LLAMA_TAGS if text.startswith(tag, at)), "")
    begin = skip(text, at + len(tag))
    if tag == PYTHON_START and text.startswith(PYTHON_END, begin):
        begin = skip(text, begin + len(PYTHON_END))
    if not tag and not _begins_like_a_call(text, begin):
        return Found(at)
    calls: list[WrittenCall] = []
    end = begin
    try:
        while end < len(text) and not text.startswith(LLAMA_TAGS, end):
            as_json = text.startswith("{", end)
            read, end = json_calls(text, end) if as_json else function_calls(text, end, python_value)
            calls += read
            end = skip(text, end)
            if text.startswith((";", PYTHON_END), end):
                end = skip(text, end + (1 if text[end] == ";" else len(PYTHON_END)))
        if not calls:
            raise NoCallError("there is no call")
    except NOT_READ:
        return Found(len(text), malformed=text[at:])
    return Found(end, tuple(calls))


def _begins_like_a_call(text: str, at: int) -> bool:
    """Tell whether an object or a list at `at` begins like calls, and not like an answer that is JSON."""
    if LOOKS_LIKE_FUNCTIONS.match(text, at):
        return True
    return bool(LOOKS_LIKE_A_CALL.match(text, at) and HAS_ARGUMENTS.search(text, at))


MISTRAL_NAME = re.compile(
    r"\[TOOL_CALLS\]\s*(?P<name>[^\[\]{}\s]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?(?=\{)"
)
MISTRAL_NAMED, MISTRAL_LIST = (
    NamedJson("[TOOL_CALLS]", MISTRAL_NAME, closing="</s>"),
    JsonCalls("[TOOL_CALLS]"),
)


def read_mistral(text: str, at: int, schemas: Schemas) -> Found:
    """Read [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...] or [TOOL_CALLS]name[ARGS]{...}."""
    return (MISTRAL_NAMED if MISTRAL_NAME.match(text, at) else MISTRAL_LIST)(text, at, schemas)
