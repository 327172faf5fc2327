"""OpenAI's chat completions."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from actors.episodes.task import JSON, ChatMessage
from actors.gateway.dialects.base import (
    MOST_CHOICES,
    MOST_STOPS,
    Body,
    ChatDialect,
    Part,
    Request,
    Shown,
    content_of,
    data_event,
    text_of,
    unmet,
    wanted,
)
from actors.gateway.dialects.exchange import Ask, Reply
from actors.gateway.dialects.known_chats import KnownChats, Meaning
from actors.gateway.dialects.refusal import RefusedError
from actors.policy.messages import Tool, ToolCall


class _Function(Body):
    name: str
    arguments: str = ""


class _Call(Body):
    id: str = ""
    function: _Function


class _Image(Body):
    url: str


class _ChatPart(Part):
    image_url: _Image | None = None

    @property
    def image(self) -> str | None:
        return None if self.image_url is None else self.image_url.url


class _Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_ChatPart] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    function_call: JsonValue = None
    audio: JsonValue = None
    prefix: bool | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.function_call is not None or self.audio is not None:
            raise ValueError("function_call and audio are not read here: send tool_calls and text")
        if self.content is None and self.role in ("system", "developer", "user"):
            raise ValueError(f"a message of role {self.role!r} has no content")
        return self


class _Declared(Body):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None


class _Tool(Body):
    type: Literal["function"] = "function"
    function: _Declared


class _StreamOptions(Body):
    include_usage: bool | None = None


class _Request(Request):
    model: str = ""
    messages: Annotated[list[_Message], Field(min_length=1)]
    tools: list[_Tool] | None = None
    tool_choice: JsonValue = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    temperature: Annotated[float | None, Field(ge=0)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: int | None = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: JsonValue = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: JsonValue = None
    seed: int | None = None


def _parse(raw: bytes, known: KnownChats[Meaning]) -> Ask:
    request, meanings = known.read(raw, _Request, _meanings)
    tools = () if request.tool_choice == "none" else tuple(map(declared, request.tools or ()))
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    last = request.messages[-1]
    goes_on = last.role == "assistant" and bool(last.prefix or request.continue_final_message)
    return Ask(
        model=request.model,
        messages=tuple(chain.from_iterable(meanings[:-1] if goes_on else meanings)),
        prefix=text_of(last.content) if goes_on else "",
        tools=tools,
        stream=bool(request.stream),
        sampling=wanted(request, request.max_completion_tokens or request.max_tokens),
        stop=tuple(filter(None, stop)),
        choices=request.n or 1,
        tells_logprobs=bool(request.logprobs),
        must_call=demanded(request.tool_choice),
        may_call=allowed(request.tool_choice),
        one_call=request.parallel_tool_calls is False,
        unmet=(
            *unmet(request, "frequency_penalty", "presence_penalty", "logit_bias", "seed"),
            *request.unmet,
        ),
        unmeetable=(*unmet(request, "response_format", "top_logprobs"), *request.unmeetable),
        usage_in_stream=bool(request.stream_options and request.stream_options.include_usage),
    )


def demanded(choice: JsonValue) -> tuple[str, ...] | None:
    """Return the tools of which OpenAI's `tool_choice` demands one, none for any; None where it does not."""
    if choice == "required":
        return ()
    if not isinstance(choice, dict):
        return None
    if choice.get("type") == "allowed_tools":
        return allowed(choice) if _limits(choice).get("mode") == "required" else None
    named = choice.get("function", choice)
    name = named.get("name") if isinstance(named, dict) else None
    return (name,) if isinstance(name, str) else ()


def allowed(choice: JsonValue) -> tuple[str, ...] | None:
    """Return the tools that OpenAI's `tool_choice` allows to be called; None where it allows all."""
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return None
    tools = _limits(choice).get("tools")
    each = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    named = (tool.get("function", tool) for tool in each)
    return tuple(str(one.get("name")) for one in named if isinstance(one, dict))


def _limits(choice: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return what `allowed_tools` says, which chat completions write one level deeper than responses."""
    deeper = choice.get("allowed_tools")
    return deeper if isinstance(deeper, dict) else choice


def declared(tool: _Tool) -> Tool:
    return {"type": "function", "function": tool.function.model_dump(exclude_none=True)}


def _meanings(request: _Request, _: Sequence[Meaning]) -> list[Meaning]:
    return [(_message(given),) for given in request.messages]


def _message(given: _Message) -> ChatMessage:
    role = "system" if given.role == "developer" else given.role
    message: Shown = {"role": role, "content": content_of(given.content) or given.refusal or ""}
    if (reasoning := given.reasoning_content or given.reasoning) is not None:
        message["reasoning_content"] = reasoning
    if given.tool_calls:
        message["tool_calls"] = [
            ToolCall(call.id, call.function.name, call.function.arguments).as_json
            for call in given.tool_calls
        ]
    if given.name:
        message["name"] = given.name
    if given.role == "tool":
        message["tool_call_id"] = given.tool_call_id or ""
    return message


def _body(ask: Ask, reply: Reply) -> Shown:
    choices: list[JSON] = [_choice(number, each) for number, each in enumerate(reply.all)]
    return {**_head(ask, reply, "chat.completion"), "choices": choices, "usage": _usage(reply)}


def _choice(number: int, reply: Reply) -> Shown:
    message: Shown = {"role": "assistant", "content": reply.content or (None if reply.tool_calls else "")}
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [call.as_json for call in reply.tool_calls]
    told = _logprobs(reply)
    return {"index": number, "message": message, "logprobs": told, "finish_reason": reply.finish}


def _logprobs(reply: Reply) -> Shown | None:
    if reply.logprobs is None:
        return None
    tokens: list[JSON] = [
        {"token": text, "logprob": nats, "bytes": list(text.encode()), "top_logprobs": []}
        for text, nats in reply.logprobs
    ]
    return {"content": tokens, "refusal": None}


def _events(ask: Ask, reply: Reply) -> Iterator[bytes]:
    head = _head(ask, reply, "chat.completion.chunk")
    usage: Shown = {"usage": None} if ask.usage_in_stream else {}
    for number, each in enumerate(reply.all):
        for delta in _deltas(each):
            yield data_event({**head, "choices": [_chunk(number, delta)], **usage})
        last = {**_chunk(number, {}), "logprobs": _logprobs(each), "finish_reason": each.finish}
        yield data_event({**head, "choices": [last], **usage})
    if ask.usage_in_stream:
        yield data_event({**head, "choices": [], "usage": _usage(reply)})
    yield b"data: [DONE]\n\n"


def _deltas(reply: Reply) -> Iterator[Shown]:
    yield {"role": "assistant", "content": ""}
    if reply.reasoning:
        yield {"reasoning_content": reply.reasoning}
    if reply.content:
        yield {"content": reply.content}
    for index, call in enumerate(reply.tool_calls):
        yield {"tool_calls": [{"index": index, **call.as_json}]}


def _chunk(number: int, delta: Shown) -> Shown:
    return {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}


def _head(ask: Ask, reply: Reply, kind: str) -> Shown:
    return {
        "id": f"chatcmpl-{reply.reply_id}",
        "object": kind,
        "created": reply.created_s,
        "model": ask.model,
    }


def _usage(reply: Reply) -> Shown:
    """Return the counts; clients read the details unasked, so that none may be null."""
    sampled = sum(each.completion_tokens for each in reply.all)
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": reply.prompt_tokens + sampled,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def error(refusal: RefusedError) -> Shown:
    kind = "server_error" if refusal.status >= 500 else "invalid_request_error"
    return {"error": {"message": str(refusal), "type": kind, "param": None, "code": refusal.code}}


def _error_event(refusal: RefusedError) -> bytes:
    return data_event(error(refusal))


OPENAI_CHAT = ChatDialect(_body, _events, error, _error_event, keep_alive=b": keep-alive\n\n", parse=_parse)
