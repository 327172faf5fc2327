"""Tools of OpenAI's responses: functions, custom tools, both in namespaces, and those of OpenAI's servers."""

import json
from collections.abc import Iterable, Iterator

from pydantic import JsonValue

from actors.gateway.dialects.base import Body, Shown
from actors.gateway.dialects.exchange import Origin
from actors.gateway.dialects.refusal import invalid
from actors.policy.messages import Tool, ToolCall, ToolCallError

PLAIN = ("", "functions")
"""Namespaces whose tools keep their names."""
INPUT = "input"
"""Parameter by which a custom tool gets its text."""


class DeclaredTool(Body):
    """A tool, or a namespace of some."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    format: dict[str, JsonValue] | None = None
    tools: list["DeclaredTool"] = []  # noqa: RUF012 - pydantic copies defaults


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name under which the policy calls a tool of a namespace."""
    return name if (namespace or "") in PLAIN else f"{namespace}__{name}"


class OfferedTools:
    """The tools of a request as the policy is offered them. Raises `RefusedError` for one without a name."""

    def __init__(self, tools: Iterable[DeclaredTool]) -> None:
        self.functions: list[Tool] = []
        self.origins: dict[str, Origin] = {}
        self.left_out: list[str] = []
        self._add(tools, None)

    def _add(self, tools: Iterable[DeclaredTool], namespace: str | None) -> None:
        for tool in tools:
            if tool.type == "namespace":
                self._add(tool.tools, tool.name)
            elif tool.type not in ("function", "custom"):
                self.left_out.append(tool.type)
            elif not tool.name:
                raise invalid(f"a tool of type {tool.type!r} has no name")
            else:
                self._offer(tool, namespace)

    def _offer(self, tool: DeclaredTool, namespace: str | None) -> None:
        name, is_custom = flat_name(tool.name, namespace), tool.type == "custom"
        function: Shown = {"name": name}
        if description := "\n".join(_described(tool)):
            function["description"] = description
        if is_custom:
            text: Shown = {INPUT: {"type": "string"}}
            function["parameters"] = {"type": "object", "properties": text, "required": [INPUT]}
        elif tool.parameters is not None:
            function["parameters"] = tool.parameters
        if is_custom or namespace:
            self.origins[name] = Origin(tool.name, namespace, is_custom)
        self.functions.append({"type": "function", "function": function})


def _described(tool: DeclaredTool) -> Iterator[str]:
    """Yield what says how to use a tool; a custom one may have a grammar, which the policy reads."""
    if tool.description:
        yield tool.description
    if tool.format is not None and isinstance(grammar := tool.format.get("definition"), str):
        yield f"Its input has this grammar ({tool.format.get('syntax')}):\n{grammar}"


def custom_call(call_id: str, name: str, text: str) -> ToolCall:
    """Return the call of a custom tool as the policy wrote it."""
    return ToolCall(call_id, name, json.dumps({INPUT: text}))


def custom_input(call: ToolCall) -> str:
    """Return the text of a custom tool's call; what the policy wrote otherwise stays as it is."""
    try:
        text = call.parsed().get(INPUT)
    except ToolCallError:
        text = None
    return text if isinstance(text, str) else call.arguments
