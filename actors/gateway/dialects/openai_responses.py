"""OpenAI's responses. A request brings the whole conversation, or goes on from one that was answered."""

import json
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Annotated, Literal

from pydantic import Field, JsonValue, TypeAdapter

from actors.episodes.task import ChatMessage
from actors.gateway.dialects.base import (
    Body,
    Dialect,
    Part,
    Shown,
    content_of,
    data_event,
    text_of,
    unmet,
    wanted,
)
from actors.gateway.dialects.exchange import Ask, Origin, Reply
from actors.gateway.dialects.openai_chat import demanded, error
from actors.gateway.dialects.refusal import RefusedError, invalid, parsed
from actors.policy.messages import Tool, ToolCall, ToolCallError

PLAIN = ("", "functions")
"""Namespaces whose tools keep their names."""
INPUT = "input"
"""Parameter by which a custom tool gets its text."""
MOST_KEPT = 32
"""Answers of a session that its requests may go on from."""


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
    return ToolCall(call_id, name, json.dumps({INPUT: text}))


def custom_input(call: ToolCall) -> str:
    """Return the text of a custom tool's call; what the policy wrote otherwise stays as it is."""
    try:
        text = call.parsed().get(INPUT)
    except ToolCallError:
        text = None
    return text if isinstance(text, str) else call.arguments


class _Part(Part):
    image_url: str | None = None

    @property
    def image(self) -> str | None:
        return self.image_url


class _Item(Body):
    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: str | list[_Part] | None = None
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    arguments: str = ""
    input: str = ""
    tools: list[DeclaredTool] = []  # noqa: RUF012 - pydantic copies defaults
    output: str | list[_Part] | None = None
    summary: list[Part] | None = None


class _Text(Body):
    format: dict[str, JsonValue] | None = None


class _Named(Body):
    id: str


class _Request(Body):
    model: str = ""
    input: str | list[_Item]
    previous_response_id: str | None = None
    conversation: str | _Named | None = None
    store: bool | None = True
    instructions: str | None = None
    tools: list[DeclaredTool] | None = None
    tool_choice: JsonValue = None
    stream: bool | None = None
    temperature: Annotated[float | None, Field(ge=0)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    text: _Text | None = None
    top_logprobs: int | None = None

    @property
    def items(self) -> list[_Item]:
        return [_Item(content=self.input)] if isinstance(self.input, str) else self.input

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, _Named) else self.conversation


class _Begun(Body):
    items: list[_Item] | None = None


ITEMS = TypeAdapter(list[_Item])


@dataclass(frozen=True, slots=True)
class _History:
    """What the items of a conversation come to."""

    messages: tuple[ChatMessage, ...] = ()
    tools: tuple[DeclaredTool, ...] = ()

    def followed_by(self, items: Sequence[_Item]) -> "_History":
        tools = (tool for item in items for tool in item.tools)
        return _History(_messages(items, self.messages), (*self.tools, *tools))


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """Items of a conversation, as JSON, behind those before them, which other answers have too."""

    items: bytes
    before: "_Kept | None"
    whole_bytes: int
    """Size of all of the conversation's items."""

    def backwards(self) -> Iterator["_Kept"]:
        part: _Kept | None = self
        while part is not None:
            yield part
            part = part.before


@dataclass(frozen=True, slots=True)
class Continued:
    """A request with what it goes on from, and what is to be kept of it."""

    ask: Ask
    history: _History
    """What it goes on from, and its own items."""
    before: _Kept | None
    items: Sequence[_Item]
    """Items to keep with the answer; there are none where nothing is to be kept."""
    conversation: str | None
    """Id under which they are kept, besides the answer's own."""


def _parse(raw: bytes) -> Ask:
    request = parsed(_Request, raw)
    return _asked(request, _History().followed_by(request.items))


def _asked(request: _Request, history: _History) -> Ask:
    if not history.messages:
        raise invalid("input: give at least one message")
    system: list[ChatMessage] = []
    if request.instructions:
        system.append({"role": "system", "content": request.instructions})
    text_format = [f"text.{name}" for name in unmet(request.text, "format")] if request.text else []
    offered = OfferedTools(() if request.tool_choice == "none" else (*(request.tools or ()), *history.tools))
    return Ask(
        model=request.model,
        messages=(*system, *history.messages),
        tools=tuple(offered.functions),
        origins=offered.origins,
        left_out=tuple(offered.left_out),
        stream=bool(request.stream),
        sampling=wanted(request, request.max_output_tokens),
        must_call=demanded(request.tool_choice),
        unmeetable=(*text_format, *unmet(request, "top_logprobs")),
    )


class KeptResponses:
    """The conversations behind the latest answers of a session, for requests that go on from one of them.
    Conversations share what they have in common, and of a request that goes on from the newest one only what
    is new is read."""

    def __init__(self, most_bytes: int) -> None:
        """Keep nothing yet, and never more than `most_bytes` of JSON: the actor's memory has to hold it."""
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._newest: tuple[_Kept | None, _History] = (None, _History())
        """The conversation that was kept last, and what it comes to."""

    def begin(self, raw: bytes) -> str:
        name, items = f"conv_{secrets.token_hex(12)}", parsed(_Begun, raw or b"{}").items or []
        self._put(_following(None, items), _History().followed_by(items), name)
        return name

    def read(self, raw: bytes, *, again: bool = False) -> Continued:
        """Return a request with all that it goes on from. One that comes `again` may do without, since it
        gets the answer of the first time. Raises `RefusedError` for a response or conversation that is not
        kept, and for a whole that is larger than a body may be."""
        request = parsed(_Request, raw)
        conversation, before = request.conversation_id, None
        if conversation is not None and request.previous_response_id is not None:
            raise invalid("conversation and previous_response_id: a request goes on from one of them")
        if earlier := conversation or request.previous_response_id:
            before = self._kept.get(earlier)
            if before is None and again:
                return Continued(_parse(raw), _History(), None, (), None)
            if before is None:
                kind = "previous_response" if conversation is None else "conversation"
                reason = f"{earlier!r} is none of this session's latest: send the whole input"
                raise RefusedError(404, f"{kind}_not_found", f"{earlier}: {reason}")
            if (size := before.whole_bytes + len(raw)) > self._most_bytes:
                raise RefusedError(
                    413, "request_too_large",
                    f"what it goes on from and the request have {size} bytes together, more than "
                    f"{self._most_bytes}: send less, or raise actors.environment.gateway.most_body_bytes",
                )  # fmt: skip
        history = self._history(before).followed_by(request.items)
        stored = request.store is not False or conversation is not None
        return Continued(
            _asked(request, history), history, before, request.items if stored else (), conversation
        )

    def keep(self, asked: Continued, body: Shown) -> None:
        """Keep an answer behind the items that it answers, unless that was done for an earlier attempt."""
        if asked.items and str(body["id"]) not in self._kept:
            output = ITEMS.validate_python(body["output"])
            kept = _following(asked.before, [*asked.items, *output])
            self._put(kept, asked.history.followed_by(output), str(body["id"]), asked.conversation)

    def _history(self, kept: _Kept | None) -> _History:
        newest, history = self._newest
        if kept is newest:
            return history
        parts = [*kept.backwards()] if kept is not None else []
        return _History().followed_by(
            [item for part in reversed(parts) for item in ITEMS.validate_json(part.items)]
        )

    def _put(self, kept: _Kept, history: _History, *names: str | None) -> None:
        self._newest = kept, history
        for name in filter(None, names):
            self._kept[name] = kept
            self._kept.move_to_end(name)
        while len(self._kept) > MOST_KEPT or self.size_bytes > self._most_bytes:
            self._kept.popitem(last=False)

    @property
    def size_bytes(self) -> int:
        """Return the size of all that is kept, of which each part counts once."""
        parts: dict[int, int] = {}
        for kept in self._kept.values():
            for part in kept.backwards():
                if id(part) in parts:  # and so are those before it
                    break
                parts[id(part)] = len(part.items)
        return sum(parts.values())


def _following(before: _Kept | None, items: list[_Item]) -> _Kept:
    data = ITEMS.dump_json(items, exclude_defaults=True)
    return _Kept(data, before, len(data) + (before.whole_bytes if before is not None else 0))


def _messages(items: Sequence[_Item], before: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Return the conversation; what an assistant thought, said and called in a row is one message."""
    messages = [*before]
    for item in items:
        match item.type:
            case "message" if item.role != "assistant":
                role = "system" if item.role == "developer" else item.role
                messages.append({"role": role, "content": content_of(item.content)})
            case "function_call_output" | "custom_tool_call_output":
                answer: Shown = {
                    "role": "tool",
                    "tool_call_id": item.call_id,
                    "content": content_of(item.output),
                }
                messages.append(answer)
            case "message" | "function_call" | "custom_tool_call" | "reasoning":
                _add_to_assistant(messages, item)
            case "agent_message":  # of another agent of Codex's
                messages.append({"role": "user", "content": text_of(item.content)})
            case "additional_tools" | "configuration_update":  # tools are read elsewhere, effort is the run's
                pass
            case _:
                raise invalid(f"input of type {item.type!r}: give messages, calls of tools and their outputs")
    return tuple(messages)


def _add_to_assistant(messages: list[ChatMessage], item: _Item) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    message: Shown = {**messages[-1]}  # earlier requests have it too
    messages[-1] = message
    if item.type == "message":
        message["content"] = f"{message['content']}{text_of(item.content)}"
    elif item.type == "reasoning":
        parts = item.content if isinstance(item.content, list) else []
        message["reasoning_content"] = "".join(part.text or "" for part in (parts or item.summary or []))
    else:
        calls = message.get("tool_calls", [])
        assert isinstance(calls, list)
        name = flat_name(item.name, item.namespace)
        is_custom = item.type == "custom_tool_call"
        called = custom_call(item.call_id, name, item.input) if is_custom else None
        called = called or ToolCall(item.call_id, name, item.arguments)
        message["tool_calls"] = [*calls, called.as_json]


def _body(ask: Ask, reply: Reply) -> Shown:
    status = "incomplete" if reply.finish == "length" else "completed"
    return {
        **_head(ask, reply, status),
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": list(_items(ask, reply, "completed")),
        "usage": _usage(reply),
    }


def _head(ask: Ask, reply: Reply, status: str) -> Shown:
    return {
        "id": f"resp_{reply.reply_id}",
        "object": "response",
        "created_at": reply.created_s,
        "status": status,
        "model": ask.model,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "output": [],
        "usage": None,
    }


def _items(ask: Ask, reply: Reply, status: str) -> Iterator[Shown]:
    if reply.reasoning:
        thought: Shown = {"type": "reasoning_text", "text": reply.reasoning}
        yield {"id": f"rs_{reply.reply_id}", "type": "reasoning", "summary": [], "content": [thought]}
    if reply.content or not reply.tool_calls:
        yield {
            "id": f"msg_{reply.reply_id}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_text_part(reply.content)],
        }
    for number, call in enumerate(reply.tool_calls):
        origin = ask.origins.get(call.name, Origin(call.name))
        yield {
            "id": f"{'ctc' if origin.is_custom else 'fc'}_{reply.reply_id}_{number}",
            "type": "custom_tool_call" if origin.is_custom else "function_call",
            "status": status,
            "call_id": call.id,
            "name": origin.name,
            **({"namespace": origin.namespace} if origin.namespace else {}),
            **({"input": custom_input(call)} if origin.is_custom else {"arguments": call.arguments}),
        }


def _text_part(text: str) -> Shown:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(reply: Reply) -> Shown:
    return {
        "input_tokens": reply.prompt_tokens,
        "output_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }


def _events(ask: Ask, reply: Reply) -> Iterator[bytes]:
    numbers = count()
    for name, content in _named_events(ask, reply):
        yield data_event({"type": name, "sequence_number": next(numbers), **content}, name)


def _named_events(ask: Ask, reply: Reply) -> Iterator[tuple[str, Shown]]:
    begun = _head(ask, reply, "in_progress")
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(_items(ask, reply, "completed")):
        where: Shown = {"output_index": index, "item_id": item["id"]}
        yield from _item_events(item, where)
    ended = _body(ask, reply)
    yield f"response.{ended['status']}", {"response": ended}


CALL_EVENTS = {
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}
"""Names of the events of a call, and where its item has what was written, by the type of the item."""


def _item_events(item: Shown, where: Shown) -> Iterator[tuple[str, Shown]]:
    index: Shown = {"output_index": where["output_index"]}
    match item["type"]:
        case "message":
            yield (
                "response.output_item.added",
                {**index, "item": {**item, "status": "in_progress", "content": []}},
            )
            yield from _text_events(item, where)
        case "function_call" | "custom_tool_call":
            kind, key = CALL_EVENTS[str(item["type"])]
            begun = {**item, "status": "in_progress", key: ""}
            yield "response.output_item.added", {**index, "item": begun}
            yield f"response.{kind}.delta", {**where, "delta": item[key]}
            yield f"response.{kind}.done", {**where, "name": item["name"], key: item[key]}
        case _:
            yield "response.output_item.added", {**index, "item": item}
    yield "response.output_item.done", {**index, "item": item}


def _text_events(item: Shown, where: Shown) -> Iterator[tuple[str, Shown]]:
    assert isinstance(item["content"], list)
    part: Shown = item["content"][0]
    at: Shown = {**where, "content_index": 0}
    yield "response.content_part.added", {**at, "part": _text_part("")}
    yield "response.output_text.delta", {**at, "delta": part["text"], "logprobs": []}
    yield "response.output_text.done", {**at, "text": part["text"], "logprobs": []}
    yield "response.content_part.done", {**at, "part": part}


def _error_event(refusal: RefusedError) -> bytes:
    if refusal.code in TOLD_IN_STREAMS:
        failed: Shown = {"code": refusal.code, "message": str(refusal)}
        response: Shown = {"id": "resp_0", "object": "response", "status": "failed", "error": failed}
        return data_event(
            {"type": "response.failed", "sequence_number": 0, "response": response}, "response.failed"
        )
    content: Shown = {"type": "error", "code": refusal.code, "message": str(refusal), "param": None}
    return data_event({**content, "sequence_number": 0}, "error")


TOLD_IN_STREAMS = frozenset(("context_length_exceeded",))
"""Codex shortens its history where a stream says so, and gives up where a status does."""
OPENAI_RESPONSES = Dialect(
    _parse, _body, _events, error, _error_event,
    keep_alive=b": keep-alive\n\n", told_in_streams=TOLD_IN_STREAMS,
)  # fmt: skip
