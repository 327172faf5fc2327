"""OpenAI's responses, without what its servers keep: a request brings the whole conversation."""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from actors.episodes.task import ChatMessage
from actors.gateway.dialects.base import (
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
from actors.gateway.dialects.openai_chat import error
from actors.gateway.dialects.refusal import RefusedError, invalid
from actors.policy.messages import Tool, ToolCall


class _Item(Body):
    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: str | list[Part] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | list[Part] | None = None
    summary: list[Part] | None = None


class _Tool(Body):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None


class _Text(Body):
    format: dict[str, JsonValue] | None = None


class _Request(Body):
    model: str = ""
    input: str | Annotated[list[_Item], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[_Tool] | None = None
    tool_choice: JsonValue = None
    stream: bool | None = None
    temperature: Annotated[float | None, Field(ge=0)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    text: _Text | None = None
    top_logprobs: int | None = None


def _parse(raw: bytes) -> Ask:
    request = parsed(_Request, raw)
    if request.previous_response_id is not None:
        raise invalid("previous_response_id: responses are not kept here, send the whole input")
    items = [_Item(content=request.input)] if isinstance(request.input, str) else request.input
    system: list[ChatMessage] = []
    if request.instructions:
        system.append({"role": "system", "content": request.instructions})
    return Ask(
        model=request.model,
        messages=(*system, *_messages(items)),
        tools=() if request.tool_choice == "none" else tuple(map(_declared, request.tools or ())),
        stream=bool(request.stream),
        sampling=wanted(
            temperature=request.temperature,
            top_p=request.top_p,
            max_new_tokens=request.max_output_tokens,
        ),
        unmet=unmet(
            {
                "tool_choice": request.tool_choice,
                "text.format": request.text.format if request.text is not None else None,
                "top_logprobs": request.top_logprobs,
            }
        ),
    )


def _declared(tool: _Tool) -> Tool:
    if tool.type != "function" or not tool.name:
        raise invalid(f"tool of type {tool.type!r}: only named functions are run by clients")
    function: Shown = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.parameters is not None:
        function["parameters"] = tool.parameters
    return {"type": "function", "function": function}


def _messages(items: Sequence[_Item]) -> list[ChatMessage]:
    """Return the conversation; what an assistant thought, said and called in a row is one message."""
    messages: list[Shown] = []
    for item in items:
        match item.type:
            case "message" if item.role != "assistant":
                role = "system" if item.role == "developer" else item.role
                messages.append({"role": role, "content": text_of(item.content)})
            case "function_call_output":
                answer: Shown = {
                    "role": "tool",
                    "tool_call_id": item.call_id,
                    "content": text_of(item.output),
                }
                messages.append(answer)
            case "message" | "function_call" | "reasoning":
                _add_to_assistant(messages, item)
            case _:
                raise invalid(f"input of type {item.type!r}: give messages, function calls and their outputs")
    return list(messages)


def _add_to_assistant(messages: list[Shown], item: _Item) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    message = messages[-1]
    if item.type == "message":
        message["content"] = f"{message['content']}{text_of(item.content)}"
    elif item.type == "reasoning":
        parts = item.content if isinstance(item.content, list) else []
        message["reasoning_content"] = "".join(part.text or "" for part in (parts or item.summary or []))
    else:
        calls = message.setdefault("tool_calls", [])
        assert isinstance(calls, list)
        calls.append(ToolCall(item.call_id, item.name, item.arguments).as_json)


def _body(ask: Ask, reply: Reply) -> Shown:
    status = "incomplete" if reply.finish == "length" else "completed"
    return {
        **_head(ask, reply, status),
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": list(_items(reply, "completed")),
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


def _items(reply: Reply, status: str) -> Iterator[Shown]:
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
        yield {
            "id": f"fc_{reply.reply_id}_{number}",
            "type": "function_call",
            "status": status,
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
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
    for index, item in enumerate(_items(reply, "completed")):
        where: Shown = {"output_index": index, "item_id": item["id"]}
        yield from _item_events(item, where)
    ended = _body(ask, reply)
    yield f"response.{ended['status']}", {"response": ended}


def _item_events(item: Shown, where: Shown) -> Iterator[tuple[str, Shown]]:
    index: Shown = {"output_index": where["output_index"]}
    match item["type"]:
        case "message":
            yield (
                "response.output_item.added",
                {**index, "item": {**item, "status": "in_progress", "content": []}},
            )
            yield from _text_events(item, where)
        case "function_call":
            begun = {**item, "status": "in_progress", "arguments": ""}
            yield "response.output_item.added", {**index, "item": begun}
            arguments = item["arguments"]
            yield "response.function_call_arguments.delta", {**where, "delta": arguments}
            done: Shown = {**where, "name": item["name"], "arguments": arguments}
            yield "response.function_call_arguments.done", done
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
    content: Shown = {"type": "error", "code": refusal.code, "message": str(refusal), "param": None}
    return data_event({**content, "sequence_number": 0}, "error")


OPENAI_RESPONSES = Dialect(_parse, _body, _events, error, _error_event, keep_alive=b": keep-alive\n\n")
