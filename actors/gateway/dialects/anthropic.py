"""Anthropic's messages."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from actors.episodes.task import JSON, ChatMessage
from actors.gateway.dialects.base import (
    FAILED,
    MOST_STOPS,
    Body,
    ChatDialect,
    Part,
    Request,
    Shown,
    arguments_of,
    content_of,
    data_event,
    text_of,
    unmet,
    wanted,
)
from actors.gateway.dialects.exchange import Ask, Reply
from actors.gateway.dialects.known_chats import KnownChats, Meaning
from actors.gateway.dialects.refusal import RefusedError, TooLongError, invalid
from actors.policy.messages import Tool, ToolCall

DATED = re.compile(r"(.+)_\d{8}")
PATH = {"path": {"type": "string"}}
LINE = {"type": "integer"}
EDITS: Mapping[str, JSON] = {
    **PATH,
    "file_text": {"type": "string"},
    "old_str": {"type": "string"},
    "new_str": {"type": "string"},
    "insert_line": LINE,
    "insert_text": {"type": "string"},
    "view_range": {"type": "array", "items": LINE, "description": "first and last line"},
}
FINISH = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
}
SIGNATURE = "recorded"
"""Thinking is signed, as clients expect; the gateway accepts any signature."""


def _schema(properties: Mapping[str, JSON], *required: str) -> Mapping[str, JSON]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _command(*names: str) -> Mapping[str, JSON]:
    return {"command": {"type": "string", "enum": list(names)}}


CLIENT_SIDE: Mapping[str, tuple[str, Mapping[str, JSON]]] = MappingProxyType({
    "bash": (
        "Runs a command in a shell that keeps its state, or starts the shell anew.",
        _schema({"command": {"type": "string"}, "restart": {"type": "boolean"}}),
    ),
    "text_editor": (
        "Views, creates and edits files.",
        _schema(
            {**_command("view", "create", "str_replace", "insert", "undo_edit"), **EDITS}, "command", "path"
        ),
    ),
    "memory": (
        "Keeps notes in files below /memories.",
        _schema(
            {
                **_command("view", "create", "str_replace", "insert", "delete", "rename"),
                **EDITS,
                "old_path": {"type": "string"},
                "new_path": {"type": "string"},
            },
            "command",
        ),
    ),
})  # fmt: skip
"""What client-side tools do and their parameters, by the type without its date: clients send neither."""


def client_side(kind: str) -> tuple[str, Mapping[str, JSON]] | None:
    """Return what a tool of such a type does and its parameters; None where clients do not carry it out."""
    dated = DATED.fullmatch(kind)
    return CLIENT_SIDE.get(dated[1]) if dated else None


class _Source(Body):
    type: str
    media_type: str = ""
    data: str = ""
    url: str = ""


class _Part(Part):
    source: _Source | None = None

    @property
    def image(self) -> str | None:
        if self.type != "image" or self.source is None:
            return None
        source = self.source
        return source.url or f"data:{source.media_type};base64,{source.data}"


class _Block(_Part):
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, JsonValue] = {}  # noqa: RUF012 - pydantic copies defaults
    tool_use_id: str = ""
    content: str | list[_Part] | None = None
    is_error: bool | None = None


class _Message(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _Tool(Body):
    type: str | None = None
    name: str = ""
    description: str | None = None
    input_schema: dict[str, JsonValue] | None = None


class _Choice(Body):
    type: str
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class _Thinking(Body):
    type: str


class _Output(Request):
    format: JsonValue = None


class _Request(Request):
    model: str = ""
    messages: Annotated[list[_Message], Field(min_length=1)]
    system: str | list[Part] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _Choice | None = None
    thinking: _Thinking | None = None
    output_config: _Output | None = None
    stream: bool | None = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=1)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: int | None = None
    stop_sequences: Annotated[list[str] | None, Field(max_length=MOST_STOPS)] = None


def _parse(raw: bytes, known: KnownChats[Meaning]) -> Ask:
    request, meanings = known.read(raw, _Request, _meanings, has_numbers=True)
    prefix = _prefill(request.messages[-1]) if len(meanings) > 1 else None
    choice, output = request.tool_choice or _Choice(type="auto"), request.output_config or _Output()
    messages: list[ChatMessage] = []
    if system := text_of(request.system):
        messages.append({"role": "system", "content": system})
    messages.extend(chain.from_iterable(meanings if prefix is None else meanings[:-1]))
    return Ask(
        model=request.model,
        messages=tuple(messages),
        tools=() if choice.type == "none" else tuple(filter(None, map(_declared, request.tools or ()))),
        left_out=tuple(str(tool.type) for tool in request.tools or () if _declared(tool) is None),
        stream=bool(request.stream),
        sampling=wanted(request, request.max_tokens),
        stop=tuple(filter(None, request.stop_sequences or ())),
        prefix=prefix or "",
        must_call=_demanded(choice),
        one_call=bool(choice.disable_parallel_tool_use),
        unmet=(*request.unmet, *(f"output_config.{name}" for name in output.unread)),
        unmeetable=(*request.unmeetable, *(f"output_config.{name}" for name in unmet(output, "format"))),
        shows_reasoning=request.thinking is not None and request.thinking.type != "disabled",
    )


def _demanded(choice: _Choice) -> tuple[str, ...] | None:
    if choice.type not in ("any", "tool"):
        return None
    return (choice.name,) if choice.type == "tool" else ()


def _prefill(last: _Message) -> str | None:
    """Return the words by which the client has begun the answer; None where the last message is none."""
    return text_of(last.content) if last.role == "assistant" else None


def _declared(tool: _Tool) -> Tool | None:
    """Return a tool as templates take it; None for one that runs at Anthropic."""
    known = None
    if tool.type not in (None, "custom") and (known := client_side(tool.type)) is None:
        return None
    described, parameters = known or (tool.description, tool.input_schema or {"type": "object"})
    function: Shown = {"name": tool.name, "parameters": parameters}
    if described is not None:
        function["description"] = described
    return {"type": "function", "function": function}


def _meanings(request: _Request, _: Sequence[Meaning]) -> list[Meaning]:
    return [tuple(_messages(given)) for given in request.messages]


def _messages(given: _Message) -> Iterator[ChatMessage]:
    """Yield a message as one or, where it answers tool calls, as several."""
    blocks = (
        [_Block(type="text", text=given.content)] if isinstance(given.content, str) else list(given.content)
    )
    if given.role == "assistant":
        yield _assistant(blocks)
        return
    answered = [block.type == "tool_result" for block in blocks]
    if answered != sorted(answered, reverse=True):
        raise invalid("blocks of type 'tool_result' come first in their message, and text behind them")
    for block in blocks:
        if block.type == "tool_result":
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)}
    rest = [block for block in blocks if block.type != "tool_result"]
    if rest:
        yield {"role": given.role, "content": content_of(rest)}


def _result(block: _Block) -> JSON:
    """Return what a tool answered; one that failed says so, as a field that templates do not know does."""
    content = content_of(block.content)
    if not block.is_error:
        return content
    if isinstance(content, str):
        return content if content.lower().startswith(FAILED.lower()) else f"{FAILED}: {content}"
    return [{"type": "text", "text": f"{FAILED}: "}, *content] if isinstance(content, list) else content


def _assistant(blocks: list[_Block]) -> ChatMessage:
    thoughts = "".join(block.thinking for block in blocks if block.type == "thinking")
    calls = [ToolCall(b.id, b.name, json.dumps(b.input)).as_json for b in blocks if b.type == "tool_use"]
    beside = ("thinking", "redacted_thinking", "tool_use")
    parts = [block for block in blocks if block.type not in beside]
    message: Shown = {"role": "assistant", "content": text_of(parts)}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = calls
    return message


def _body(ask: Ask, reply: Reply) -> Shown:
    return {
        **_head(ask, reply),
        "content": list(_blocks(ask, reply)),
        **_ended(reply),
        "usage": _usage(reply),
    }


def _ended(reply: Reply) -> Shown:
    reason = FINISH[reply.finish] if reply.stop_text is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": reply.stop_text}


def _head(ask: Ask, reply: Reply) -> Shown:
    return {
        "id": f"msg_{reply.reply_id}",
        "type": "message",
        "role": "assistant",
        "model": ask.model,
        "stop_sequence": None,
    }


def _blocks(ask: Ask, reply: Reply) -> Iterator[Shown]:
    if reply.reasoning and ask.shows_reasoning:
        yield {"type": "thinking", "thinking": reply.reasoning, "signature": SIGNATURE}
    if reply.content or not reply.tool_calls:
        yield {"type": "text", "text": reply.content}
    for call in reply.tool_calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments_of(call)}


def _usage(reply: Reply) -> Shown:
    return {
        "input_tokens": reply.prompt_tokens,
        "output_tokens": reply.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _events(ask: Ask, reply: Reply) -> Iterator[bytes]:
    started = {**_head(ask, reply), "content": [], "stop_reason": None}
    yield _event("message_start", {"message": {**started, "usage": {**_usage(reply), "output_tokens": 0}}})
    for index, block in enumerate(_blocks(ask, reply)):
        empty, deltas = _pieces(block)
        yield _event("content_block_start", {"index": index, "content_block": empty})
        for delta in deltas:
            yield _event("content_block_delta", {"index": index, "delta": delta})
        yield _event("content_block_stop", {"index": index})
    yield _event("message_delta", {"delta": _ended(reply), "usage": _usage(reply)})
    yield _event("message_stop", {})


def _pieces(block: Shown) -> tuple[Shown, list[Shown]]:
    match block["type"]:
        case "tool_use":
            arguments: Shown = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            return {**block, "input": {}}, [arguments]
        case "thinking":
            signed: Shown = {"type": "signature_delta", "signature": block["signature"]}
            thought: Shown = {"type": "thinking_delta", "thinking": block["thinking"]}
            return {**block, "thinking": "", "signature": ""}, [thought, signed]
    return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]


def _event(name: str, content: Shown) -> bytes:
    return data_event({"type": name, **content}, name)


def _error(refusal: RefusedError) -> Shown:
    kind = ERROR_TYPES.get(refusal.status, "api_error" if refusal.status >= 500 else "invalid_request_error")
    message = str(refusal)
    if isinstance(refusal, TooLongError):  # agents that read it shorten their history and go on
        message = f"prompt is too long: {refusal.tokens} tokens > {refusal.limit} maximum"
    return {"type": "error", "error": {"type": kind, "message": message}}


def _error_event(refusal: RefusedError) -> bytes:
    return data_event(_error(refusal), "error")


PING = data_event({"type": "ping"}, "ping")
ANTHROPIC = ChatDialect(_body, _events, _error, _error_event, keep_alive=PING, parse=_parse)
