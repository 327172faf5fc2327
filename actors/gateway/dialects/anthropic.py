"""Anthropic's messages."""

import json
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from actors.episodes.task import ChatMessage
from actors.gateway.dialects.base import (
    MOST_STOPS,
    Body,
    Dialect,
    Part,
    Shown,
    data_event,
    parsed,
    text_of,
    unmet,
    wanted,
)
from actors.gateway.dialects.exchange import Ask, Reply
from actors.gateway.dialects.refusal import RefusedError, invalid
from actors.policy.messages import Tool, ToolCall, ToolCallError

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


class _Block(Body):
    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, JsonValue] = {}  # noqa: RUF012 - pydantic copies defaults
    tool_use_id: str = ""
    content: str | list[Part] | None = None


class _Message(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _Tool(Body):
    type: str | None = None
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    input_schema: dict[str, JsonValue] | None = None


class _Choice(Body):
    type: str


class _Thinking(Body):
    type: str


class _Request(Body):
    model: str = ""
    messages: Annotated[list[_Message], Field(min_length=1)]
    system: str | list[Part] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _Choice | None = None
    thinking: _Thinking | None = None
    stream: bool | None = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=1)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: int | None = None
    stop_sequences: Annotated[list[str] | None, Field(max_length=MOST_STOPS)] = None


def _parse(raw: bytes) -> Ask:
    request = parsed(_Request, raw)
    choice = request.tool_choice.type if request.tool_choice is not None else "auto"
    messages: list[ChatMessage] = []
    if system := text_of(request.system):
        messages.append({"role": "system", "content": system})
    for message in request.messages:
        messages.extend(_messages(message))
    return Ask(
        model=request.model,
        messages=tuple(messages),
        tools=() if choice == "none" else tuple(map(_declared, request.tools or ())),
        stream=bool(request.stream),
        sampling=wanted(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            max_new_tokens=request.max_tokens,
        ),
        stop=tuple(filter(None, request.stop_sequences or ())),
        unmet=unmet({"tool_choice": choice}),
        shows_reasoning=request.thinking is not None and request.thinking.type != "disabled",
    )


def _declared(tool: _Tool) -> Tool:
    if tool.type not in (None, "custom"):
        raise invalid(
            f"tool {tool.name!r} of type {tool.type!r} runs at Anthropic: declare tools of your own"
        )
    function: Shown = {"name": tool.name, "parameters": tool.input_schema or {"type": "object"}}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _messages(given: _Message) -> Iterator[ChatMessage]:
    """Yield a message as one or, where it answers tool calls, as several."""
    blocks = (
        [_Block(type="text", text=given.content)] if isinstance(given.content, str) else list(given.content)
    )
    if given.role == "assistant":
        yield _assistant(blocks)
        return
    for block in blocks:
        if block.type == "tool_result":
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": text_of(block.content)}
    rest = [block for block in blocks if block.type != "tool_result"]
    if rest:
        yield {"role": given.role, "content": text_of([Part(type=b.type, text=b.text) for b in rest])}


def _assistant(blocks: list[_Block]) -> ChatMessage:
    thoughts = "".join(block.thinking for block in blocks if block.type == "thinking")
    calls = [ToolCall(b.id, b.name, json.dumps(b.input)).as_json for b in blocks if b.type == "tool_use"]
    beside = ("thinking", "redacted_thinking", "tool_use")
    parts = [Part(type=b.type, text=b.text) for b in blocks if b.type not in beside]
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
        "stop_reason": FINISH[reply.finish],
        "usage": _usage(reply),
    }


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
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call)}


def _input(call: ToolCall) -> Shown:
    """Return the arguments as an object, which this API wants; what is none stands in a field of its own."""
    try:
        return dict(call.parsed())
    except ToolCallError:
        return {"malformed_arguments": call.arguments}


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
    ended: Shown = {"stop_reason": FINISH[reply.finish], "stop_sequence": None}
    yield _event("message_delta", {"delta": ended, "usage": _usage(reply)})
    yield _event("message_stop", {})


def _pieces(block: Shown) -> tuple[Shown, list[Shown]]:
    """Return a block as it begins, and what is then added to it."""
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
    return {"type": "error", "error": {"type": kind, "message": str(refusal)}}


def _error_event(refusal: RefusedError) -> bytes:
    return data_event(_error(refusal), "error")


PING = data_event({"type": "ping"}, "ping")
ANTHROPIC = Dialect(_parse, _body, _events, _error, _error_event, keep_alive=PING)
