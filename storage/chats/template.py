"""Renders chats by a model's chat template, with tool calls in the form that the template takes."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Literal, NamedTuple, Protocol, TypeAlias

from jinja2 import TemplateError

from bus.errors import SluiceError

Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None
Message: TypeAlias = Mapping[str, Json]
REFUSED = TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError, OverflowError
"""What a template raises for messages that it does not foresee."""
STAND_IN = "Sluice5b1e"
"""Text of the probes, which no template writes by itself."""
QUESTION_TEXT = "Question5b1e?"
QUESTION: Message = {"role": "user", "content": QUESTION_TEXT}
TOOL_RESULT: Message = {"role": "tool", "name": "probe", "tool_call_id": "call00000", "content": "."}
PROBE_TOOL: Mapping[str, Json] = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Probe.",
        "parameters": {
            "type": "object",
            "properties": {
                "value": {"type": "string", "description": "Text."},
                "number": {"type": "integer", "description": "Number."},
                "on": {"type": "boolean", "description": "Whether."},
            },
            "required": ["value"],
        },
    },
}


class Renders(Protocol):
    """The part of a transformers tokenizer that renders chats."""

    @property
    def chat_template(self) -> str | Mapping[str, str] | None:
        """Return the template, or templates by name."""

    def apply_chat_template(
        self, conversation: list[Message], *, tools: list[Message] | None, tokenize: bool,
        add_generation_prompt: bool,
    ) -> str:  # fmt: skip
        """Render a chat as text."""


class ChatRefusedError(SluiceError, ValueError):
    """The chat template refuses a chat."""


class CallForm(NamedTuple):
    """How a template wants messages with tool calls."""

    arguments: Literal["object", "text"]
    """Type of the arguments: a mapping, or its JSON text."""
    ids: Literal["given", "functions.name:number"]
    """Ids of calls; Kimi's template writes the id in place of the name."""


FORMS = tuple(
    CallForm(arguments, ids) for ids in ("given", "functions.name:number") for arguments in ("object", "text")
)
WRITTEN_WRONG = "{'value'", '{\\"value\\"'
"""Signs of arguments that were given in the other form: Python's text of a mapping, JSON text as a string."""


class ChatTemplate:
    """The chat template of a tokenizer.

    OpenAI's messages have the arguments of a tool call as JSON text. Some templates take them so, most as an
    object; which form it is, is found by trying."""

    def __init__(self, tokenizer: Renders) -> None:
        self._tokenizer = tokenizer

    @property
    def text(self) -> str:
        """Return the template, or all templates where it has several by name."""
        found = self._tokenizer.chat_template or ""
        return found if isinstance(found, str) else "\n".join(found.values())

    def render(self, messages: Sequence[Json], tools: Sequence[Json] = (), *, go_on: bool = True) -> str:
        """Return a chat as text, with `go_on` up to where the assistant starts to speak. Raises
        `ChatRefusedError`."""
        forms = self._forms if any(map(_calls, messages)) else FORMS[:1]
        refused: Exception | None = None
        for form in forms:
            try:
                return self._rendered(messages, tools, form, go_on=go_on)
            except REFUSED as error:
                refused = refused or error
        raise ChatRefusedError(str(refused)) from refused

    def examples(self) -> Iterator[str]:
        """Yield what the template writes of some chats: a turn, several, a call and its result."""
        answer: Message = {"role": "assistant", "content": STAND_IN}
        chats = [QUESTION], [QUESTION, answer, QUESTION], [QUESTION, answer_with_calls(1), TOOL_RESULT]
        for chat in chats:
            for tools in ([], [PROBE_TOOL]):
                with suppress(ChatRefusedError):
                    yield self.render(chat, tools)

    @cached_property
    def _forms(self) -> tuple[CallForm, ...]:
        """The forms, those first by which the template writes a call as JSON or in a way of its own."""
        return tuple(sorted(FORMS, key=lambda form: not self._is_right(form)))

    def _is_right(self, form: CallForm) -> bool:
        try:
            text = self._rendered([QUESTION, answer_with_calls(1)], [PROBE_TOOL], form, go_on=False)
        except REFUSED:
            return False
        answer = text.rpartition(QUESTION_TEXT)[2]
        written = "probe" in answer and STAND_IN in answer
        return written and not any(sign in answer for sign in WRITTEN_WRONG)

    def _rendered(
        self, messages: Sequence[Json], tools: Sequence[Json], form: CallForm, *, go_on: bool
    ) -> str:
        ids = _function_ids(messages) if form.ids != "given" else {}
        return self._tokenizer.apply_chat_template(
            [_formed(message, form, ids) for message in messages],
            tools=[tool for tool in tools if isinstance(tool, Mapping)] or None,
            tokenize=False,
            add_generation_prompt=go_on,
        )


def answer_with_calls(count: int, text: str = "", **others: Json) -> Message:
    """Return an answer that consists of calls of `PROBE_TOOL`, whose values are `STAND_IN`, a number and
    `text`."""
    calls: list[Json] = [
        {
            "id": f"call0000{number}",
            "type": "function",
            "function": {"name": "probe", "arguments": {"value": f"{STAND_IN}{number}{text}", **others}},
        }
        for number in range(count)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def as_object(arguments: Json) -> Json:
    """Return the arguments of a call as an object; what is no JSON of one stays what it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        read = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return read if isinstance(read, dict) else arguments


def _function_ids(messages: Sequence[Json]) -> Mapping[Json, str]:
    calls = [call for message in messages for call in _calls(message)]
    named = ((call.get("id"), call.get("function")) for call in calls if isinstance(call, Mapping))
    return {
        given: f"functions.{function.get('name')}:{number}"
        for number, (given, function) in enumerate(named)
        if isinstance(function, Mapping)
    }


def _calls(message: Json) -> Sequence[Json]:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    return calls if isinstance(calls, Sequence) and not isinstance(calls, str) else ()


def _formed(message: Json, form: CallForm, ids: Mapping[Json, str]) -> Message:
    if not isinstance(message, Mapping):
        raise TypeError(f"a message is an object, and not {type(message).__name__}")
    if message.get("content") is None:
        message = {**message, "content": ""}
    if (answered := message.get("tool_call_id")) in ids:
        message = {**message, "tool_call_id": ids[answered]}
    if not (calls := _calls(message)):
        return message
    return {**message, "tool_calls": [_formed_call(call, form, ids) for call in calls]}


def _formed_call(call: Json, form: CallForm, ids: Mapping[Json, str]) -> Json:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    arguments = as_object(function.get("arguments"))
    if form.arguments == "text" and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    given = call.get("id")
    return {
        "type": "function",
        **call,
        **({"id": ids[given]} if given in ids else {}),
        "function": {**function, "arguments": arguments},
    }
