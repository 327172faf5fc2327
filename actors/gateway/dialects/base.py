"""What a dialect is: one API's requests, answers, streams and errors, as functions without state."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from actors.episodes.task import JSON
from actors.gateway.dialects.exchange import Ask, Reply
from actors.gateway.dialects.known_chats import KnownChats, Meaning
from actors.gateway.dialects.refusal import RefusedError, invalid
from actors.policy.messages import ToolCall, ToolCallError

MOST_STOPS = 16
"""Stop texts of a request: each is looked for in every answer."""
MOST_CHOICES = 16
"""Answers to one request: each takes a place at the engine."""
MOST_NAMED = 16
"""Fields of a request that are named as not heeded."""
WORD = re.compile(r"\w{1,40}", re.ASCII)
CHANGES_NOTHING = frozenset((
    "background", "betas", "cache_control", "client_metadata", "inference_geo", "labels", "metadata",
    "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "safetySettings", "safety_settings",
    "service_tier", "store", "stream_options", "user",
))  # fmt: skip
"""Fields that say who asks, and how to cache and to bill: without them an answer is the same."""
USELESS_WITHOUT = frozenset((
    "audio", "cachedContent", "cached_content", "ebnf", "function_call", "functions", "grammar",
    "guided_choice", "guided_grammar", "guided_json", "guided_regex", "json_schema", "output_format",
    "prompt", "regex", "responseModalities", "response_modalities", "structured_outputs",
))  # fmt: skip
"""Fields of schemas, of tools in a form that is gone, and of parts of the prompt that are elsewhere."""
ANYWAY: tuple[JSON, ...] = (
    None, 0, False, "auto", "none", "disabled", {"type": "text"}, {}, [], ["text"], ["TEXT"],
)  # fmt: skip
"""Values of fields that say what holds without them."""
FAILED = "Error"
"""Word before the answer of a tool that failed."""
Shown = dict[str, JSON]


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API over HTTP."""

    body: Callable[[Ask, Reply], Shown]
    events: Callable[[Ask, Reply], Iterator[bytes]]
    """Yield the answer as server-sent events, to the last one."""
    error: Callable[[RefusedError], Shown]
    error_event: Callable[[RefusedError], bytes]
    """Return a refusal for a stream that has begun."""
    keep_alive: bytes
    """What a stream carries while nothing is known."""
    told_in_streams: frozenset[str] = frozenset()
    """Codes of refusals that a client which asked for a stream reads there, and not with a status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDialect(Dialect):
    """One API whose requests hold their whole chat."""

    parse: Callable[[bytes, KnownChats[Meaning]], Ask]
    """Read a request, of whose chat only what is not known is read; raises `RefusedError`."""


class Body(BaseModel):
    """Part of a request. What it does not declare is ignored: clients send ever more."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class Request(Body, extra="allow"):
    """A request, or a part of one that holds settings: what it does not declare is named as not heeded."""

    @property
    def unread(self) -> tuple[str, ...]:
        """Return the names of fields that are set, and are not read."""
        given = self.model_extra or {}
        names = (name for name in given.keys() - CHANGES_NOTHING if given[name] not in ANYWAY)
        return tuple(sorted(filter(WORD.fullmatch, names))[:MOST_NAMED])

    @property
    def unmet(self) -> tuple[str, ...]:
        return tuple(name for name in self.unread if name not in USELESS_WITHOUT)

    @property
    def unmeetable(self) -> tuple[str, ...]:
        return tuple(name for name in self.unread if name in USELESS_WITHOUT)


class Part(Body):
    """One part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @property
    def said(self) -> str:
        """Return the part's words. Raises `RefusedError` for a part that has none."""
        said = self.refusal if self.type == "refusal" else self.text
        if said is None:
            raise invalid(f"content of type {self.type!r} has no text")
        return said

    @property
    def image(self) -> str | None:
        """Return the address of the image that the part shows, most often a data URI; None for others."""
        return None


TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def text_of(content: str | Sequence[Part] | None) -> str:
    """Return a message's content as text. Raises `RefusedError` for pictures and whatever else is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in TEXT_PARTS:
            raise invalid(f"content of type {part.type!r}: only text is read here")
    return "".join(part.said for part in content)


def content_of(content: str | Sequence[Part] | None) -> JSON:
    """Return a message's content, as parts where it shows images. Raises `RefusedError` for what is neither
    text nor an image."""
    if content is None or isinstance(content, str):
        return content or ""
    images = {number: url for number, part in enumerate(content) if (url := part.image) is not None}
    if not images:
        return text_of(content)
    return [
        {"type": "image_url", "image_url": {"url": images[number]}}
        if number in images
        else {"type": "text", "text": text_of([part])}
        for number, part in enumerate(content)
    ]


def wanted(request: Body, max_new_tokens: int | None) -> dict[str, float]:
    """Return the sampling that a client set, by the names that all APIs have for it."""
    asked = {name: getattr(request, name, None) for name in ("temperature", "top_p", "top_k")}
    asked["max_new_tokens"] = max_new_tokens
    return {name: value for name, value in asked.items() if value is not None}


def unmet(request: Body, *names: str) -> tuple[str, ...]:
    """Return the names of fields that are set and not to what holds anyway."""
    return tuple(name for name in names if getattr(request, name) not in ANYWAY)


def arguments_of(call: ToolCall) -> Shown:
    """Return arguments as an object, which some APIs want; what is none stands in a field of its own."""
    try:
        return dict(call.parsed())
    except ToolCallError:
        return {"malformed_arguments": call.arguments}


def data_event(content: Mapping[str, JSON], name: str | None = None) -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(content)}\n\n".encode()
