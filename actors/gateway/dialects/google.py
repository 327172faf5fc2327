"""Google's generateContent, as genai, gemini-cli and google-adk ask it."""

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator
from pydantic.alias_generators import to_camel

from actors.episodes.task import JSON, ChatMessage
from actors.gateway.dialects.base import (
    FAILED,
    MOST_CHOICES,
    MOST_STOPS,
    Body,
    ChatDialect,
    Part,
    Request,
    Shown,
    arguments_of,
    content_of,
    data_event,
    unmet,
    wanted,
)
from actors.gateway.dialects.exchange import Ask, Reply
from actors.gateway.dialects.known_chats import KnownChats, Meaning
from actors.gateway.dialects.refusal import RefusedError, TooLongError, invalid, parsed
from actors.policy.messages import Tool, ToolCall

FINISH = {"stop": "STOP", "length": "MAX_TOKENS", "tool_calls": "STOP"}
STATUSES = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND"}
JSON_TYPE = "application/json"


SIGNATURES = frozenset(("thoughtSignature", "thought_signature"))
"""What a part may have beside its content, or alone: nobody here has signed anything."""


class _Camel(Body, alias_generator=to_camel, populate_by_name=True):
    """Part of a request, whose fields Google writes in camel case, or as here."""


class _Blob(_Camel):
    mime_type: str
    data: str


class _Called(_Camel):
    id: str | None = None
    name: str
    args: dict[str, JsonValue] = {}  # noqa: RUF012 - pydantic copies defaults


class _Answered(_Camel):
    id: str | None = None
    name: str
    response: dict[str, JsonValue] = {}  # noqa: RUF012 - pydantic copies defaults
    parts: list["_Part"] = []  # noqa: RUF012 - pydantic copies defaults


class _Part(Part, extra="allow", alias_generator=to_camel, populate_by_name=True):
    type: str = "text"
    thought: bool = False
    inline_data: _Blob | None = None
    function_call: _Called | None = None
    function_response: _Answered | None = None

    @model_validator(mode="after")
    def _is_read(self) -> Self:
        has_content = any(
            (self.text is not None, self.inline_data, self.function_call, self.function_response)
        )
        if others := () if has_content else (self.model_extra or {}).keys() - SIGNATURES:
            raise ValueError(
                f"{min(others)} is not read here: send text, inlineData, functionCall or functionResponse"
            )
        return self

    @property
    def image(self) -> str | None:
        blob = self.inline_data
        return None if blob is None else f"data:{blob.mime_type};base64,{blob.data}"


class _Content(_Camel):
    role: Literal["user", "model", "function", "system"] = "user"
    parts: list[_Part] = []  # noqa: RUF012 - pydantic copies defaults


class _Function(_Camel):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    parameters_json_schema: dict[str, JsonValue] | None = None


class _Tools(_Camel, extra="allow"):
    function_declarations: list[_Function] = []  # noqa: RUF012 - pydantic copies defaults


class _Calling(_Camel):
    mode: str = "AUTO"
    allowed_function_names: list[str] = []  # noqa: RUF012 - pydantic copies defaults


class _ToolConfig(_Camel):
    function_calling_config: _Calling = _Calling()


class _Thinking(_Camel):
    include_thoughts: bool = False


class _Generation(Request, alias_generator=to_camel, populate_by_name=True):
    temperature: Annotated[float | None, Field(ge=0)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: float | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    candidate_count: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stop_sequences: Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    response_mime_type: str | None = None
    response_schema: JsonValue = None
    response_json_schema: JsonValue = None
    response_logprobs: bool | None = None
    logprobs: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    thinking_config: _Thinking = _Thinking()


class _Request(Request, alias_generator=to_camel, populate_by_name=True):
    contents: Annotated[list[_Content], Field(min_length=1)]
    system_instruction: _Content | None = None
    tools: list[_Tools] = []  # noqa: RUF012 - pydantic copies defaults
    tool_config: _ToolConfig = _ToolConfig()
    generation_config: _Generation = _Generation()


class _Counted(_Camel):
    generate_content_request: _Request | None = None
    contents: list[_Content] = []  # noqa: RUF012 - pydantic copies defaults


def _parse(raw: bytes, known: KnownChats[Meaning]) -> Ask:
    return _ask(
        *known.read(
            raw, _Request, _meanings, field="contents", has_numbers=True, stands_alone=_is_of_the_model
        )
    )


def parse_counted(raw: bytes) -> Ask:
    """Read a request whose tokens are to be counted; raises `RefusedError`."""
    counted = parsed(_Counted, raw)
    request = counted.generate_content_request or parsed(_Request, raw)
    return _ask(request, _meanings(request, ()))


def _ask(request: _Request, meanings: Sequence[Meaning]) -> Ask:
    asked, calling = request.generation_config, request.tool_config.function_calling_config
    functions = [function for tools in request.tools for function in tools.function_declarations]
    system: list[ChatMessage] = []
    if request.system_instruction is not None:
        system.append({"role": "system", "content": content_of(request.system_instruction.parts)})
    return Ask(
        model="",
        messages=(*system, *chain.from_iterable(meanings)),
        tools=() if calling.mode == "NONE" else tuple(map(_declared, functions)),
        left_out=tuple(name for tools in request.tools for name in tools.model_extra or {}),
        sampling=wanted(asked, asked.max_output_tokens),
        stop=tuple(filter(None, asked.stop_sequences or ())),
        choices=asked.candidate_count or 1,
        tells_logprobs=bool(asked.response_logprobs),
        must_call=tuple(calling.allowed_function_names) if calling.mode == "ANY" else None,
        may_call=tuple(calling.allowed_function_names) or None,
        unmet=(*unmet(asked, "presence_penalty", "frequency_penalty", "seed"), *asked.unmet, *request.unmet),
        unmeetable=(
            *(["response_mime_type"] if asked.response_mime_type == JSON_TYPE else []),
            *(["response_schema"] if asked.response_schema or asked.response_json_schema else []),
            *unmet(asked, "logprobs"),
            *asked.unmeetable,
            *request.unmeetable,
        ),
        shows_reasoning=asked.thinking_config.include_thoughts,
    )


def _declared(given: _Function) -> Tool:
    function: Shown = {"name": given.name}
    if given.description is not None:
        function["description"] = given.description
    schema = given.parameters_json_schema or _lower(given.parameters)
    function["parameters"] = schema or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _lower(schema: JsonValue) -> JsonValue:
    """Return a schema with the names of types in lower case, as JSON Schema has them."""
    if isinstance(schema, list):
        return [_lower(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value.lower() if key == "type" and isinstance(value, str) else _lower(value)
        for key, value in schema.items()
    }


def _is_of_the_model(content: JsonValue) -> bool:
    """Return whether a content stands alone: what follows may answer its calls without their ids."""
    return isinstance(content, dict) and content.get("role") == "model"


def _meanings(request: _Request, before: Sequence[Meaning]) -> list[Meaning]:
    meanings: list[Meaning] = []
    waiting: list[tuple[str, str]] = []
    """Names and ids of the calls that have no answer yet: clients may leave the ids out."""
    for number, content in enumerate(request.contents, len(before)):
        if content.role == "model":
            message, waiting = _assistant(content.parts, number)
            meanings.append((message,))
        else:
            meanings.append(tuple(_given(content, waiting)))
    return meanings


def _given(content: _Content, waiting: list[tuple[str, str]]) -> Iterator[ChatMessage]:
    for part in content.parts:
        if (answered := part.function_response) is not None:
            yield {"role": "tool", "tool_call_id": _id_of(answered, waiting), "content": _result(answered)}
    rest = [part for part in content.parts if part.function_response is None]
    if rest:
        yield {"role": "system" if content.role == "system" else "user", "content": content_of(rest)}


def _assistant(parts: Sequence[_Part], number: int) -> tuple[ChatMessage, list[tuple[str, str]]]:
    """Return what the policy said, thought and called, and the calls as names and ids."""
    if any(part.image is not None for part in parts):
        raise invalid("inlineData of role 'model': the policy has shown no image")
    message: Shown = {
        "role": "assistant",
        "content": "".join(part.text or "" for part in parts if not part.thought),
    }
    if thoughts := "".join(part.text or "" for part in parts if part.thought):
        message["reasoning_content"] = thoughts
    called = [part.function_call for part in parts if part.function_call is not None]
    calls = [
        ToolCall(call.id or f"call_{number}_{n}", call.name, json.dumps(call.args))
        for n, call in enumerate(called)
    ]
    if calls:
        message["tool_calls"] = [call.as_json for call in calls]
    return message, [(call.name, call.id) for call in calls]


def _id_of(answered: _Answered, waiting: list[tuple[str, str]]) -> str:
    """Return the id of the call that is answered: the one that the client names, or the next of its tool."""
    found = next((one for one in waiting if one[1] == answered.id), None)
    found = found or next((one for one in waiting if one[0] == answered.name), None)
    if found is None:
        return answered.id or ""
    waiting.remove(found)
    return found[1]


def _result(answered: _Answered) -> JSON:
    """Return what a tool answered: alone where clients put it under one of their names, else all as JSON."""
    [(name, value), *others] = answered.response.items() or [("", "")]
    is_alone = not others and name in ("output", "result", "error", "")
    given: JSON = value if is_alone else answered.response
    said = given if isinstance(given, str) else json.dumps(given)
    said = f"{FAILED}: {said}" if is_alone and name == "error" else said
    images = [part for part in answered.parts if part.image is not None]
    return content_of([_Part(text=said), *images])


def _body(ask: Ask, reply: Reply) -> Shown:
    sampled = sum(each.completion_tokens for each in reply.all)
    return {
        "candidates": [_candidate(ask, number, each) for number, each in enumerate(reply.all)],
        "usageMetadata": {
            "promptTokenCount": reply.prompt_tokens,
            "candidatesTokenCount": sampled,
            "totalTokenCount": reply.prompt_tokens + sampled,
        },
        "modelVersion": ask.model,
        "responseId": reply.reply_id,
    }


def _candidate(ask: Ask, number: int, reply: Reply) -> Shown:
    candidate: Shown = {
        "index": number,
        "content": {"role": "model", "parts": list(_parts(ask, reply))},
        "finishReason": FINISH[reply.finish],
    }
    if reply.logprobs is not None:
        chosen: list[JSON] = [{"token": text, "logProbability": nats} for text, nats in reply.logprobs]
        candidate["logprobsResult"] = {"chosenCandidates": chosen, "topCandidates": []}
    return candidate


def _parts(ask: Ask, reply: Reply) -> Iterator[Shown]:
    if reply.reasoning and ask.shows_reasoning:
        yield {"text": reply.reasoning, "thought": True}
    if reply.content or not reply.tool_calls:
        yield {"text": reply.content}
    for call in reply.tool_calls:
        yield {"functionCall": {"id": call.id, "name": call.name, "args": arguments_of(call)}}


def _events(ask: Ask, reply: Reply) -> Iterator[bytes]:
    yield data_event(_body(ask, reply))


def _error(refusal: RefusedError) -> Shown:
    status = STATUSES.get(refusal.status, "UNAVAILABLE" if refusal.status >= 500 else "FAILED_PRECONDITION")
    message = str(refusal)
    if isinstance(refusal, TooLongError):
        message = (
            f"The input token count ({refusal.tokens}) exceeds the maximum number of tokens allowed "
            f"({refusal.limit})."
        )
    return {"error": {"code": refusal.status, "message": message, "status": status}}


def _error_event(refusal: RefusedError) -> bytes:
    return json.dumps(_error(refusal)).encode() + b"\n"


GOOGLE = ChatDialect(
    _body, _events, _error, _error_event, parse=_parse,
    keep_alive=b"\n",  # genai takes any other line for JSON, comments too
)  # fmt: skip
