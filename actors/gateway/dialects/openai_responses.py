"""OpenAI's responses. A request brings the whole conversation, or goes on from one that was answered."""

import json
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, TypeAdapter, model_validator

from actors.episodes.task import ChatMessage
from actors.gateway.dialects.base import (
    Body,
    Dialect,
    Part,
    Request,
    Shown,
    content_of,
    data_event,
    text_of,
    unmet,
    wanted,
)
from actors.gateway.dialects.exchange import Ask, Origin, Reply
from actors.gateway.dialects.known_chats import KnownChats
from actors.gateway.dialects.openai_chat import allowed, demanded, error
from actors.gateway.dialects.refusal import RefusedError, invalid, parsed
from actors.policy.messages import Tool, ToolCall, ToolCallError

PLAIN = ("", "functions")
"""Namespaces whose tools keep their names."""
INPUT = "input"
"""Parameter by which a custom tool gets its text."""
MOST_KEPT = 32
"""Answers of a session that its requests may go on from."""
CONTINUED_BY = ("previous_response_id", "conversation")
OF_ASSISTANT = ("message", "reasoning", "function_call", "custom_tool_call")
OF_NO_MESSAGE = ("additional_tools", "configuration_update")
"""Types of items that are no message: tools are read apart, and effort is the run's."""


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

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.type in ("message", "agent_message") and self.content is None:
            raise ValueError("a message has no content: an item that is only named by its id is not kept")
        if self.type in ("function_call", "custom_tool_call") and not self.name:
            raise ValueError(f"an item of type {self.type!r} has no name")
        return self


class _Text(Body):
    format: dict[str, JsonValue] | None = None


class _Named(Body):
    id: str


class _Request(Request):
    model: str = ""
    input: str | list[_Item]
    previous_response_id: str | None = None
    conversation: str | _Named | None = None
    store: bool | None = True
    instructions: str | None = None
    tools: list[DeclaredTool] | None = None
    tool_choice: JsonValue = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
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

    @property
    def goes_on_from(self) -> str | None:
        return self.conversation_id or self.previous_response_id


class _Begun(Body):
    items: list[_Item] | None = None


LOGPROBS = "message.output_text.logprobs"
ITEMS = TypeAdapter(list[_Item])


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """An item of a conversation, behind those before it, which other conversations have too."""

    number: int
    """Messages that the conversation has up to here."""
    message: ChatMessage | None
    """The last message, which further items of the same assistant go on."""
    tools: tuple[DeclaredTool, ...]
    """Tools that the item declares."""
    before: "_Kept | None"
    size_bytes: int
    """Size of the item as JSON."""
    whole_bytes: int
    """Size of all of the conversation's items."""

    def backwards(self) -> Iterator["_Kept"]:
        item: _Kept | None = self
        while item is not None:
            yield item
            item = item.before


@dataclass(frozen=True, slots=True)
class Continued:
    """A request with its conversation."""

    ask: Ask
    last: _Kept | None
    """The conversation's last item, behind which the answer is kept; None where nothing is to be kept."""
    conversation: str | None
    """Id under which the answer is kept, besides its own."""


def _asked(request: _Request, last: _Kept | None) -> Ask:
    """Return what a request asks for, by the last item of its conversation."""
    messages, tools = _history(last)
    if not messages:
        raise invalid("input: give at least one message")
    system: list[ChatMessage] = []
    if request.instructions:
        system.append({"role": "system", "content": request.instructions})
    text_format = [f"text.{name}" for name in unmet(request.text, "format")] if request.text else []
    offered = OfferedTools(() if request.tool_choice == "none" else (*(request.tools or ()), *tools))
    return Ask(
        model=request.model,
        messages=(*system, *messages),
        tools=tuple(offered.functions),
        origins=offered.origins,
        left_out=tuple(offered.left_out),
        stream=bool(request.stream),
        sampling=wanted(request, request.max_output_tokens),
        must_call=demanded(request.tool_choice),
        may_call=allowed(request.tool_choice),
        one_call=request.parallel_tool_calls is False,
        unmet=request.unmet,
        unmeetable=(
            *text_format,
            *unmet(request, "top_logprobs"),
            *(["include"] if LOGPROBS in (request.include or ()) else []),
            *request.unmeetable,
        ),
    )


class KeptResponses:
    """Reads the requests of a session, of which only new items are read, and keeps the conversations behind
    its latest answers, for requests that go on from one of them. Conversations share what they have in
    common."""

    def __init__(self, most_bytes: int) -> None:
        """Keep nothing yet, and never more than `most_bytes` of JSON: the actor's memory has to hold it."""
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, _Kept | None] = OrderedDict()
        self._chats = KnownChats[_Kept]()

    def begin(self, raw: bytes) -> str:
        name, items = f"conv_{secrets.token_hex(12)}", parsed(_Begun, raw or b"{}").items or []
        self._put(_last(None, items), name)
        return name

    def read(self, raw: bytes, *, again: bool = False) -> Continued:
        """Return a request with all messages that it goes on from. One that comes `again` may do without,
        since it gets the answer of the first time. Raises `RefusedError` for a response or conversation that
        is not kept, and for a whole that is larger than a body may be."""

        def items_of(request: _Request, before: Sequence[_Kept]) -> list[_Kept]:
            last = before[-1] if before else self._before(request, len(raw), again=again)
            return _following(last, request.items) or ([] if last is None else [last])

        request, items = self._chats.read(
            raw, _Request, items_of, field="input", continued_by=CONTINUED_BY, has_numbers=True
        )
        last, earlier = items[-1] if items else None, request.goes_on_from
        is_stored = request.store is not False or request.conversation_id is not None
        is_whole = not earlier or earlier in self._kept
        kept = last if is_stored and is_whole else None
        return Continued(_asked(request, last), kept, request.conversation_id)

    def _before(self, request: _Request, size_bytes: int, *, again: bool) -> _Kept | None:
        """Return the last item of what a request goes on from by its id."""
        conversation = request.conversation_id
        if conversation is not None and request.previous_response_id is not None:
            raise invalid("conversation and previous_response_id: a request goes on from one of them")
        earlier = request.goes_on_from
        if not earlier or (again and earlier not in self._kept):
            return None
        if earlier not in self._kept:
            kind = "previous_response" if conversation is None else "conversation"
            reason = f"{earlier!r} is none of this session's latest: send the whole input"
            raise RefusedError(404, f"{kind}_not_found", f"{earlier}: {reason}")
        before = self._kept[earlier]
        if before is not None and (size := before.whole_bytes + size_bytes) > self._most_bytes:
            raise RefusedError(
                413, "request_too_large",
                f"what it goes on from and the request have {size} bytes together, more than "
                f"{self._most_bytes}: send less, or raise actors.environment.gateway.most_body_bytes",
            )  # fmt: skip
        return before

    def keep(self, asked: Continued, body: Shown) -> None:
        """Keep an answer behind the items that it answers, unless that was done for an earlier attempt."""
        if asked.last is not None and str(body["id"]) not in self._kept:
            last = _last(asked.last, ITEMS.validate_python(body["output"]))
            self._put(last, str(body["id"]), asked.conversation)

    def _put(self, last: _Kept | None, *names: str | None) -> None:
        for name in filter(None, names):
            self._kept[name] = last
            self._kept.move_to_end(name)
        while len(self._kept) > MOST_KEPT or self.size_bytes > self._most_bytes:
            self._kept.popitem(last=False)

    @property
    def size_bytes(self) -> int:
        """Return the size of all that is kept, of which each item counts once."""
        items: dict[int, int] = {}
        for last in filter(None, self._kept.values()):
            for kept in last.backwards():
                if id(kept) in items:  # all items before this one are there too
                    break
                items[id(kept)] = kept.size_bytes
        return sum(items.values())


def _following(before: _Kept | None, items: Sequence[_Item]) -> list[_Kept]:
    """Return items, each behind the one before it."""
    found: list[_Kept] = []
    for item in items:
        before = _behind(before, item)
        found.append(before)
    return found


def _last(before: _Kept | None, items: Sequence[_Item]) -> _Kept | None:
    return _following(before, items)[-1] if items else before


def _behind(before: _Kept | None, item: _Item) -> _Kept:
    """Return an item behind another; what an assistant thought, said and called in a row is one message."""
    number, message = (0, None) if before is None else (before.number, before.message)
    if item.type in OF_ASSISTANT and (item.type != "message" or item.role == "assistant"):
        is_begun = message is not None and message["role"] == "assistant"
        number, message = number + (not is_begun), _assistant(item, message if is_begun else None)
    elif item.type not in OF_NO_MESSAGE:
        number, message = number + 1, _message(item)
    size_bytes = len(item.model_dump_json(exclude_defaults=True))
    whole_bytes = size_bytes + (0 if before is None else before.whole_bytes)
    return _Kept(number, message, tuple(item.tools), before, size_bytes, whole_bytes)


def _history(last: _Kept | None) -> tuple[list[ChatMessage], list[DeclaredTool]]:
    """Return the messages of a conversation, and the tools that its items declare."""
    messages: list[ChatMessage] = []
    tools: list[DeclaredTool] = []
    wanted = last.number if last is not None else 0
    for item in last.backwards() if last is not None else ():
        if item.message is not None and item.number == wanted:
            messages.append(item.message)
            wanted -= 1
        tools.extend(reversed(item.tools))
    return messages[::-1], tools[::-1]


def _message(item: _Item) -> ChatMessage:
    match item.type:
        case "message":
            role = "system" if item.role == "developer" else item.role
            return {"role": role, "content": content_of(item.content)}
        case "function_call_output" | "custom_tool_call_output":
            return {"role": "tool", "tool_call_id": item.call_id, "content": content_of(item.output)}
        case "agent_message":  # of another agent of Codex's
            return {"role": "user", "content": text_of(item.content)}
    raise invalid(f"input of type {item.type!r}: give messages, calls of tools and their outputs")


def _assistant(item: _Item, begun: ChatMessage | None) -> ChatMessage:
    """Return an assistant's message with a further item; the one that has begun stays as it is."""
    message: Shown = {"role": "assistant", "content": "", **(begun or {})}
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
    return message


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
    _body, _events, error, _error_event,
    keep_alive=b": keep-alive\n\n", told_in_streams=TOLD_IN_STREAMS,
)  # fmt: skip
