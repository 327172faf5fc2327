"""What a completion asks of tools, and how answers get back: as the chat template says, or in tags."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from actors.episodes.task import JSON, ChatMessage
from actors.policy.messages import Completion, ToolCallError
from actors.tools.base import Arguments, Tool, ToolResult
from bus.errors import ConfigError

KINDS: Mapping[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict,
    "null": type(None),
}  # fmt: skip
"""Types of JSON schema, as Python's json reads them."""


@dataclass(frozen=True, slots=True)
class WantedCall:
    """A call that can be carried out."""

    tool: Tool
    arguments: Arguments
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """A call that cannot be carried out."""

    reason: str
    """What is wrong with the call, for the model."""
    call_id: str = ""


FoundCall = WantedCall | MalformedCall


class CallStyle(Protocol):
    """How calls and their results are written."""

    @property
    def schemas(self) -> Sequence[Mapping[str, JSON]] | None:
        """Tools as the chat template is told of them; None where it is not."""

    def calls(self, completion: Completion) -> list[FoundCall]:
        """Return the calls in a completion, in order; none means that it is the answer."""

    def results(self, answered: Sequence[tuple[FoundCall, ToolResult]]) -> list[ChatMessage]:
        """Return the messages that show the model what its calls gave."""


class NativeCalls:
    """Calls as the model's own chat template writes them, and results as messages of the role `tool`."""

    def __init__(self, tools: Mapping[str, Tool], schemas: Sequence[Mapping[str, JSON]]) -> None:
        self._tools = tools
        self.schemas: Sequence[Mapping[str, JSON]] | None = schemas

    def calls(self, completion: Completion) -> list[FoundCall]:
        """Return the calls that the policy parsed, then what it could not parse."""
        found: list[FoundCall] = []
        for call in completion.tool_calls:
            try:
                found.append(checked_call(self._tools, call.name, call.parsed(), call.id))
            except ToolCallError as error:
                found.append(MalformedCall(str(error), call.id))
        return found + [MalformedCall("this is no tool call") for _ in completion.malformed_calls]

    def results(self, answered: Sequence[tuple[FoundCall, ToolResult]]) -> list[ChatMessage]:
        """Return a message for each call; what was no call has no id, and is answered by the user."""
        messages: list[ChatMessage] = []
        for call, result in answered:
            if call.call_id:
                messages.append({"role": "tool", "tool_call_id": call.call_id, "content": result.text})
            else:
                messages.append({"role": "user", "content": result.text})
        return messages


class TaggedCalls:
    """Calls as `<name>argument</name>` in the text, for models whose template knows no tools."""

    schemas: Sequence[Mapping[str, JSON]] | None = None

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        """Raises ConfigError for a tool that needs other than one text."""
        self._tools = tools
        self._argument = {name: _only_text(tool) for name, tool in tools.items()}
        names = "|".join(map(re.escape, sorted(tools, key=len, reverse=True)))
        self._begin = re.compile(f"<({names})>")

    def calls(self, completion: Completion) -> list[FoundCall]:
        """Return the tags in order; one that is not closed is malformed."""
        text, found, place = completion.content, list[FoundCall](), 0
        while begin := self._begin.search(text, place):
            name = begin[1]
            end = text.find(f"</{name}>", begin.end())
            if end < 0 and completion.text.endswith(f"</{name}>"):
                end = len(text)  # the closing tag ended the completion, and a content has no stop string
            if end < 0:
                return [*found, MalformedCall(f"<{name}> has no </{name}>")]
            found.append(WantedCall(self._tools[name], {self._argument[name]: text[begin.end() : end]}))
            place = end + len(f"</{name}>")
        return found

    def results(self, answered: Sequence[tuple[FoundCall, ToolResult]]) -> list[ChatMessage]:
        return [{"role": "user", "content": tagged_results(answered)}]


def tagged_results(answered: Sequence[tuple[FoundCall, ToolResult]]) -> str:
    return "\n".join(f"<result>{result.text}</result>" for _, result in answered)


def checked_call(tools: Mapping[str, Tool], name: str, arguments: Arguments, call_id: str) -> FoundCall:
    """Return the call, or what is wrong with its name or its arguments by the tool's schema. Names, presence
    and kinds of the arguments are checked; what lies within them is the tool's to check."""
    tool = tools.get(name)
    if tool is None:
        return MalformedCall(f"there is no tool {name!r}; there are: {', '.join(tools)}", call_id)
    fault = _fault(tool.parameters, arguments)
    return MalformedCall(f"{name}: {fault}", call_id) if fault else WantedCall(tool, arguments, call_id)


def _fault(schema: Mapping[str, JSON], arguments: Arguments) -> str:
    properties, required = schema.get("properties"), schema.get("required")
    known = properties if isinstance(properties, Mapping) else {}
    for name in required if isinstance(required, Sequence) else []:
        if name not in arguments:
            return f"the argument {name!r} is missing"
    for name, value in arguments.items():
        if name not in known and schema.get("additionalProperties") is False:
            return f"there is no argument {name!r}; there are: {', '.join(known)}"
        if not _is_kind(value, known.get(name)):
            return f"the argument {name!r} is {value!r}, which is not of type {_kind(known.get(name))}"
    return ""


def _kind(declared: JSON) -> str:
    kind = declared.get("type") if isinstance(declared, Mapping) else None
    return kind if isinstance(kind, str) else ""


def _is_kind(value: JSON, declared: JSON) -> bool:
    kind = _kind(declared)
    if isinstance(value, bool):  # Python's booleans are numbers, JSON's are not
        return kind in ("boolean", "") or kind not in KINDS
    return isinstance(value, KINDS.get(kind, object))


def _only_text(tool: Tool) -> str:
    """Return the name of the one argument that a tool needs, a text; raises ConfigError if there is none."""
    required = tool.parameters.get("required")
    properties = tool.parameters.get("properties")
    if isinstance(required, Sequence) and len(required) == 1 and isinstance(properties, Mapping):
        name = str(required[0])
        if _kind(properties.get(name)) == "string":
            return name
    raise ConfigError(
        f'the tool {tool.name!r} does not take exactly one text, as calls = "tags" needs: '
        'set calls = "native"'
    )
